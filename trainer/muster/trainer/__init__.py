"""The trainer: consumes a run's training stream, takes GRPO steps, publishes policy versions.

`loop.py` is the flow, `process.py` puts its parts together. A step's parts, in the flow's order:

* `stream/` accepted records, and the filters that choose what is trained on
* `learn/` tensors: pure functions, or behind `learn/learner.py`
* `publish/` versions on disk, at the origin and on chain
* `recover/` state that survives crashes and collapses
* `measure/` figures, evaluations, pass rates
* `sites/` several trainers far apart
* `sft/` supervised fine-tuning: a flow of its own, with the same tensors

Everything that uses the network is behind the protocols of `ports.py`.
"""
