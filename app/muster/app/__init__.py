"""The composition root: imports all other packages and starts every process on one machine."""
