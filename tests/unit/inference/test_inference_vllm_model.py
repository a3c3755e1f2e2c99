"""The policy in vLLM's process, with an engine double in vLLM's place."""

import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from muster.inference.engine import Request
from muster.inference.vllm import model
from muster.inference.vllm.capture import Unprovable
from muster.inference.vllm.model import HostedPolicy, Options
from muster.protocol.errors import ProofError
from muster.protocol.recipe import ProofRecipe


def test_what_a_worker_cannot_prove_is_raised_here() -> None:
    arrived = pickle.loads(pickle.dumps(Unprovable("NaN")))
    policy = HostedPolicy.__new__(HostedPolicy)
    policy._engine = SimpleNamespace(collective_rpc=lambda *_args, **_kwargs: [arrived, arrived])
    with pytest.raises(ProofError, match="NaN"):
        policy._call("muster_build", 0, "a")
    policy._engine.collective_rpc = lambda *_args, **_kwargs: [[b"a"], [b"a"]]
    assert policy._call("muster_build", 0, "a") == [b"a"]


class Engine:
    """vLLM's engine, whose first step lasts until the weights are reloaded, or half a second."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.is_stepping, self.is_reloaded = Event(), Event()
        self.output_processor = SimpleNamespace(request_states={})

    def add_request(self, name: str, _given: Any, _parameters: Any, priority: int) -> str:
        del priority
        return name

    def step(self) -> list[Any]:
        self.is_stepping.set()
        self.is_reloaded.wait(0.5)
        return []

    def abort_request(self, names: Sequence[str], internal: bool) -> None:
        assert (names, internal) == (["0.0"], True)
        self.called.append("abort")

    def collective_rpc(self, method: str, args: Any, kwargs: Any) -> list[None]:
        del args, kwargs
        self.called.append(method)
        if method == "reload_weights":
            self.is_reloaded.set()
        return [None]

    def reset_prefix_cache(self) -> bool:
        return "abort" in self.called


class _Cancelled(Exception):
    pass


def test_weights_change_after_a_cancelled_run_has_ended(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    config = SimpleNamespace(get_vocab_size=lambda: 19, max_model_len=64)
    llm = SimpleNamespace(llm_engine=engine, model_config=config)
    monkeypatch.setattr(model, "_open", lambda *_: llm)
    monkeypatch.setattr(model, "_require_runs_here", lambda *_: None)
    monkeypatch.setattr(model, "_sampled", lambda *_: None)
    policy = HostedPolicy(policy_folder, Options("float32", "cpu", None, None, 1, 1, None, 1))

    def cancel(_made: Any) -> None:
        raise _Cancelled

    def generate() -> None:
        asked = [Request((1, 2), 0, 1.0, 4)]
        list(policy.generate(asked, ProofRecipe(), due=0, tick=cancel))

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(generate)
        assert engine.is_stepping.wait(10)
        assert policy.swap(policy_folder)
        assert isinstance(made.exception(), _Cancelled)
    ended = ["muster_generate", "abort", "muster_rest", "reload_weights", "muster_repack"]
    assert engine.called == ["muster_watch", *ended]
