"""What a client process is made of."""

from pathlib import Path

import pytest

from muster.client.connections import make_engine
from muster.client.settings import EngineSettings
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import ProcessEngine


# torch's device `meta` is there on every machine.
@pytest.mark.parametrize(("device", "kind"), [("cpu", TransformersEngine), ("meta", ProcessEngine)])
def test_only_an_engine_on_a_cpu_shares_its_clients_process(
    tmp_path: Path, device: str, kind: type
) -> None:
    assert type(make_engine(EngineSettings(state_dir=tmp_path, device=device))) is kind
