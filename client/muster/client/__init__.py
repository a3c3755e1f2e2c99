"""What people run on their own machines: workers, validators, relays, and the wallet they act with.

Nothing here is trusted by anyone else, and nothing here trusts the orchestrator: whatever it hands
over is checked against the chain.
"""
