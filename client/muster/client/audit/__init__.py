"""The auditor: the ledger rebuilt from chain events, every rule checked, verdicts re-executed.

It trusts nobody's word but the chain's, and that only as far as `proving` can prove it. One file
for each part: `history` reads events (from RPC endpoints by `sources`, or from a `dump`), `ledger`
takes them in, `table` lays the outcomes out in columns. `work`, `calls`, `money`, `stakes` and
`disputes` check them, and `report` adds up. `command` holds every command, `tables` prints.
`reexecution` and `verify` run verdicts again from evidence, `lineage` follows a policy's ancestry.
"""
