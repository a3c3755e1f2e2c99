"""`muster contracts`: a network's contracts, from the file that describes them to who holds them.

network.py   NETWORK.toml: what is asked for, with its bounds
costs.py     what a deployment would cost, without sending anything
standing.py  what is on chain: equal to the artifacts or not, its parameters, who holds what
sources.py   what the compiler is given, for explorers
command.py   the commands
"""
