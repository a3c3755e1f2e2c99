"""The worker: leases tickets, generates what they derive, signs and uploads it."""
