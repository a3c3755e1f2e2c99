"""The learner: from verified rollouts to new weights, on one process or several ranks."""
