"""The red team: every attack as a program, what defends against it, and how often that held."""
