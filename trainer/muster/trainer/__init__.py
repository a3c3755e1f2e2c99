"""The trainer: consumes a run's training stream, takes GRPO steps, publishes policy versions.

`loop.py` is the flow. Everything that touches tensors is pure or behind `learner.py`; everything
that touches the network is behind the protocols of `ports.py`.
"""
