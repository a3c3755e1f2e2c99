"""The composition root: the only package that sees all others. It starts every process on one machine."""
