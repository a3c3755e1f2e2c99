"""The dashboard: one page, rendered on the server, refreshed by server-sent events."""
