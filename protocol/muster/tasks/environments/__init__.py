"""Environments: what answers a model between the turns of one completion."""
