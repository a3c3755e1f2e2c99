"""What comes out of a run: a policy version as a model folder, with what it is made of.

`fetch` brings a version from relays and checks it against the chain, `card` writes what trained it,
`chat` talks to it, `command` is the command line.
"""
