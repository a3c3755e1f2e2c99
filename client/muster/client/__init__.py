"""What people run on their own machines: workers, validators, relays, and the wallet they act with.

Nobody else trusts anything here, and nothing here trusts the orchestrator: every answer of it is
checked against the chain.

cli/                        all commands but those of audit and doctor: flags, questions, printing
worker/ validator/ juror/   the processes that work and judge; two have a loop.py as their story
relay/                      the process that passes weights on
disputes/                   verdicts that somebody doubts: explained, run again, disputed, settled
audit/                      everything rebuilt from the chain and checked
doctor/                     whether a machine is fit for a run
contracts/                  a network's contracts: asked for, costed, compared with the chain
model/                      the model that a run makes: fetched, described, talked to

The modules beside this file are what several of these share.
"""
