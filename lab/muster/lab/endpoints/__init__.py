"""RPC endpoints with the faults of public ones, and the demo through such an endpoint."""
