"""The policy in vLLM's process, with an engine double in vLLM's place."""

import pickle
from types import SimpleNamespace

import pytest

from muster.inference.vllm.capture import Unprovable
from muster.inference.vllm.model import HostedPolicy
from muster.protocol.errors import ProofError


def test_what_a_worker_cannot_prove_is_raised_here() -> None:
    arrived = pickle.loads(pickle.dumps(Unprovable("NaN")))
    policy = HostedPolicy.__new__(HostedPolicy)
    policy._engine = SimpleNamespace(collective_rpc=lambda *_args, **_kwargs: [arrived, arrived])
    with pytest.raises(ProofError, match="NaN"):
        policy._call("muster_build", 0, "a")
    policy._engine.collective_rpc = lambda *_args, **_kwargs: [[b"a"], [b"a"]]
    assert policy._call("muster_build", 0, "a") == [b"a"]
