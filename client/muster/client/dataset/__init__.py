"""Data sets of verified rollouts: exported from a run's accepted submissions, and verified."""
