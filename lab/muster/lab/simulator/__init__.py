"""The whole network in one process and in virtual time, on the programs that run outside.

What is simulated is what is around them: time, the network between them, the chain's blocks (its
rules are the model that the differential tests hold equal to the contracts), the inference engine
and the machines' misfortunes. docs/scale.md says what is real and what is not.
"""
