"""What cheating is worth, and what a run's transactions cost."""
