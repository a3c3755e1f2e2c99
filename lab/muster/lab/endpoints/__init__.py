"""RPC endpoints that do wrong what public ones do, and the demo through one."""
