"""What the orchestrator does, without HTTP: leases, intake, batching, outcomes, settlement, status.

Services speak in protocol types. They refuse with an ApiError from `services.refusals` and know
neither requests nor responses.
"""
