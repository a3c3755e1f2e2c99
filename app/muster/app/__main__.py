"""`python -m muster.app` is the `muster` command; a devnet starts its children this way."""

from muster.app.cli import main

main()
