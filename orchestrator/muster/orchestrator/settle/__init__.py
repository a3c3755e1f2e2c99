"""Step 10: fraud is executed, and slashing pauses while many fail alike."""
