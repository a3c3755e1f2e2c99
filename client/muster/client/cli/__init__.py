"""All commands of the client, by what people come to do; they share `options` and `printing`.

A command parses flags, asks and prints; stdout is for data. The modules outside of this folder do
the work.
"""
