"""The juror: judges cases of the whole network."""
