"""Step 4: who may work on which slot, and for how long."""
