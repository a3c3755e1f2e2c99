"""Fakes, stages and dishonest parties for tests. Import each by its full name, as `worlds.X`."""
