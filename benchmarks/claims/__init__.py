"""The claims of the papers behind Muster, measured again: `make claims` writes docs/claims.md."""
