"""Measurements: figures of steps, evaluations of policies, pass rates of problems."""
