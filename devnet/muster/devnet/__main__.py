"""`python -m muster.devnet` is the `muster` command; a devnet starts its children this way."""

from muster.devnet.cli import main

main()
