"""The orchestrator's database: models, migrations, sessions.

It is an index over the chain and the files folder and holds nothing that cannot be rebuilt or done
without; see `muster.orchestrator.services.rebuild`.
"""
