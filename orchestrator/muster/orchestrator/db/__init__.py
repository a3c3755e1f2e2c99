"""The orchestrator's database: tables, statements, the two drivers, and group commit."""
