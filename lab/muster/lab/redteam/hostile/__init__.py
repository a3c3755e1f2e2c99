"""Hostile clients, one attack a module; each counts the answers that it gets."""
