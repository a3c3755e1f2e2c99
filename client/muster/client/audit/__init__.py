"""The auditor: the ledger rebuilt from chain events, every rule checked, verdicts re-executed.

Trusts nobody's word but the chain's, and that only as far as `proving` can prove it. Flow, one file
each: `history` reads events (from an RPC endpoint or a dump), `ledger` takes them in, `table` lays
the outcomes out in columns, `work`, `money` and `disputes` check them, `report` adds up, `command`
prints. `reexecution` runs verdicts again from an evidence store, `lineage` follows a policy's
ancestry. Only those two compute with models, and import them late.
"""
