"""Steps 7, 8 and 10: collecting and posting validators' outcomes, and pauses of slashing."""
