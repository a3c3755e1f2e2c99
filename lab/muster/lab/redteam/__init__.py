"""The red team: every attack as a program, its defence, and how often the defence held."""
