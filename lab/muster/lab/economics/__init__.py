"""The profit of cheating, and the cost of a run's transactions."""
