"""Data sets of verified rollouts: written from what a run's validators accepted, and checked."""
