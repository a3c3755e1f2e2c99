"""The auditor: the ledger rebuilt from chain events, every rule checked, verdicts re-executed.

It trusts the chain only, and an endpoint's answers only as far as `proving` can prove them. One
file for each part: `history` reads events (from RPC endpoints by `sources`, or from a `dump`),
`ledger` applies them, `table` holds the outcomes in columns. `work`, `calls`, `money`, `stakes` and
`disputes` check them, `report` joins the results. `command` holds the commands, `tables` prints.
`reexecution` and `verify` run verdicts again from evidence, `lineage` follows a policy's ancestry.
"""
