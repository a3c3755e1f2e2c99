"""`make example-reasoning`: from texts to a model that reasons, the whole way on networks."""
