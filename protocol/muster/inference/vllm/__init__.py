"""The engine on vLLM: a client here, vLLM in a process and an environment of its own.

    VllmEngine (engine.py)  --frames over a socket pair (channel.py)-->  Host (host.py)
    starts, restarts, retries     process.py                             vLLM (model.py)

What runs in which process:

* this one: `engine`, `process`, `environment`, `channel`, `messages`. They import neither vLLM nor
  torch.
* vLLM's: `child`, `host`, `model`, and inside vLLM itself `noise` (a logits processor) and
  `capture` (a worker extension), plus `channel` and `messages`.

docs/engines.md tells the design.
"""
