"""A network's contracts, from the file that describes them to who holds them.

network.py   NETWORK.toml: what is asked for, with its bounds, and what deploying it would cost
deployed.py  what is on chain: equal to the artifacts or not, its parameters, who holds what
"""
