"""The composition root: sees all other packages and starts every process on one machine."""
