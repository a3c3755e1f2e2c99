"""`muster devnet`: a local chain with the contracts."""
