"""The whole network in one process and in virtual time, with the production programs.

Only their environment is simulated: time, the network between them, the chain's blocks (whose rules
are a model that differential tests compare with the contracts), the inference engine and machine
failures. docs/scale.md says what is real and what is not.
"""
