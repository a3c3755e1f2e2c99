"""A reference model of the contracts in plain Python: `network.Network` is all nine of them.

Written from the natspec of `contracts/src/interfaces` and docs/protocol.md, never from the code:
`tests/integration/contracts/test_contracts_differential.py` gives every call to both and compares
them. Each method is the contract's function of its name, which is documented there. Accounts are
names, hashes are tuples, trees are lists, times and money are integers; a call that must fail
raises `Refused` with the error's name and arguments.

    words     parties and their terms
    stakes    MusterToken, StakeVault
    parties   WorkerRegistry, RunRegistry, JuryPool
    work      submissions, records, batches, proofs, cases
    ledger    ContributionLedger
    court     DisputeCourt, FaultCourt
    network   RewardEscrow
"""
