"""The validator: checks other people's submissions and signs their outcomes."""
