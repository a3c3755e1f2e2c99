"""The training stream: accepted records in order, their files, and the choice of trained
rollouts."""
