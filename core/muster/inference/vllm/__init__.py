"""The engine on vLLM: a client here, vLLM in a process and an environment of its own.

    VllmEngine (engine.py)  --frames over a socket pair (frames.py)--->  Host (host.py)
    starts, restarts, retries     process.py                             vLLM (model.py)

What runs in which process:

* this one: `engine`, `process`, `frames`. They import neither vLLM nor torch.
* vLLM's: `child`, `host`, `model`, and inside vLLM itself `noise` (a logits processor) and
  `capture` (a worker extension), plus `frames`.

docs/engines.md explains the design.
"""
