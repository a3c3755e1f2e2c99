"""What tests play in: fakes, stages, dishonest parties. Imported by full name, as `worlds.X`."""
