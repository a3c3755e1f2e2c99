"""Requests: who may ask, how much, and what is answered. Nothing is decided here."""
