"""`muster demo`: the whole network on one machine."""
