"""The auditor: the ledger rebuilt from chain events, every rule checked, verdicts re-executed.

It trusts the chain only, and an endpoint's answers only as far as `proving` can prove them. One
file for each part:

    history            reads events: from RPC endpoints (`endpoints`) or from a `dump`
    ledger             applies them; `outcome_table` holds the outcomes in columns
    work, calls, money, stakes, disputes        check them
    report             joins the results; `print_tables` prints them, `write_tables` exports them
    reexecution, rerun_bundle                   run verdicts again from evidence
    lineage            follows a policy's ancestry
    command            holds the commands
"""
