"""Programs for participants' own machines: workers, validators, jurors, relays, and their wallet.

Nobody has to trust these programs, and they do not trust the orchestrator: every answer of it is
checked against the chain.

cli/                        all commands but those of audit and doctor: flags, questions, printing
worker/ validator/ juror/   the processes that work and judge; two have a loop.py as their story
relay/                      the process that passes weights on
disputes/                   doubted verdicts: explained, recomputed, disputed, settled
audit/                      everything rebuilt from the chain and checked
doctor/                     whether a machine is fit for a run
contracts/                  a network's contracts: planned, costed, compared with the chain
model/                      the model that a run makes: fetched, described, talked to

The modules beside this file are shared by several of these.
"""
