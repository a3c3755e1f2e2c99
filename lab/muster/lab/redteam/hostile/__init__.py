"""Hostile clients, one attack a module; each counts what a URL or a file answers to it."""
