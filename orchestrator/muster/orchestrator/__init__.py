"""The orchestrator: leases work, accepts uploads, commits batches, posts the validators' outcomes.

It is trusted for liveness only. The chain is the source of truth; the database is an index over it
and over the files folder, and can be deleted. No torch, no transformers, no model.
"""
