"""All commands of the client, one module per task; they share `options` and `printing`.

A command parses flags, asks for confirmation and prints; stdout is for data. The modules outside of
this folder do the work.
"""
