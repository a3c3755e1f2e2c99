"""vLLM's process: killed in the middle of a batch, orphaned, and given a bad model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conformance_policy import CONTEXT, build_policy

from muster.inference.engine import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.inference.vllm.engine import VllmEngine
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe

PROOF = ProofRecipe()
ASKED = [Request((2 + i % 9, 5, 7), i, 1.0, 100) for i in range(400)]


def test_process_killed_in_the_middle_of_a_batch_is_replaced_and_the_batch_completed(
    engine: VllmEngine, policies: list[Path]
) -> None:
    reference = TransformersEngine()
    reference.load_policy(policies[0], PolicyVersion(0))
    expected = [completion.tokens for completion in reference.generate(ASKED, proof=PROOF)]
    assert engine.pid is not None
    victim = psutil.Process(engine.pid)
    used = sum(victim.cpu_times()[:2])

    def kill_while_it_computes() -> None:
        while sum(victim.cpu_times()[:2]) < used + 0.5:
            time.sleep(0.01)
        victim.kill()

    killer = threading.Thread(target=kill_while_it_computes)
    killer.start()
    made = engine.generate(ASKED, proof=PROOF)
    killer.join()
    assert [completion.tokens for completion in made] == expected
    assert engine.pid != victim.pid
    assert engine.policy_version == 0


OWNER = """
import sys, time
from pathlib import Path
from muster.inference.engine import Request
from muster.inference.vllm.engine import VllmEngine
from muster.protocol.recipe import ProofRecipe
engine = VllmEngine()
engine.load_policy(Path(sys.argv[1]), 0)
print(engine.pid, flush=True)
while True:
    engine.generate([Request((2, 5), i, 1.0, 100) for i in range(400)], proof=ProofRecipe())
"""


def test_no_vllm_outlives_its_owner(policies: list[Path]) -> None:
    command = [sys.executable, "-c", OWNER, str(policies[0])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        process = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    assert psutil.wait_procs([process], timeout=20)[1] == []


def with_config(folder: Path, change: Callable[[dict[str, object]], object]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_another_architecture_is_opened_in_another_process(
    engine: VllmEngine, policies: list[Path], tmp_path: Path
) -> None:
    before = engine.pid
    folder = shutil.copytree(policies[0], tmp_path / "other")
    with_config(folder, lambda config: config.update(rms_norm_eps=0.1))
    engine.load_policy(folder, PolicyVersion(1))
    assert engine.pid != before
    reference = TransformersEngine()
    reference.load_policy(folder, PolicyVersion(1))
    asked = ASKED[:20]
    made = [c.tokens for c in engine.generate(asked, proof=PROOF)]
    assert made == [c.tokens for c in reference.generate(asked, proof=PROOF)]


@pytest.mark.parametrize(
    ("change", "match", "hint"),
    [
        (
            {"architectures": ["NobodysForCausalLM"]},
            "vLLM knows no architecture NobodysForCausalLM",
            "--engine transformers",
        ),
        (
            {"head_dim": 16},
            "cannot compute attention heads of 16, only of 32, 64",
            "--engine transformers",
        ),
        ({"model_type": "nobodys"}, "does not load", ""),
        ({"hidden_size": 64}, "does not load in vLLM", "--engine transformers"),
    ],
)
def test_what_vllm_cannot_run_is_refused_with_a_reason(
    policies: list[Path], tmp_path: Path, change: dict[str, object], match: str, hint: str
) -> None:
    folder = shutil.copytree(policies[0], tmp_path / "other")
    with_config(folder, lambda config: config.update(change))
    engine = VllmEngine()
    with pytest.raises(EngineError, match=match) as refusal:
        engine.load_policy(folder, PolicyVersion(1))
    assert hint in (refusal.value.hint or "")
    assert engine.policy_version is None
    assert engine.pid is None


def test_memory_does_not_grow_with_swaps(engine: VllmEngine, policies: list[Path]) -> None:
    """A worker swaps its policy thousands of times."""

    def swap(times: int) -> int:
        for version in range(times):
            engine.load_policy(policies[version % 2], PolicyVersion(version))
            engine.generate(ASKED[:4], proof=PROOF)
        assert engine.pid is not None
        return psutil.Process(engine.pid).memory_info().rss

    before = swap(20)
    grown = swap(60) - before
    # 60 copies of these weights would be 70 MB.
    assert grown < 20 << 20


def test_untied_head_follows_a_swap(tmp_path: Path, engine: VllmEngine) -> None:
    folders = []
    for seed in range(2):
        folder = build_policy(tmp_path / str(seed), seed)
        weights_of_another_shape(folder, seed)
        folders.append(folder)
    reference = TransformersEngine()
    before = None
    for version in (0, 1, 0):
        engine.load_policy(folders[version], PolicyVersion(version))
        reference.load_policy(folders[version], PolicyVersion(version))
        assert before in (None, engine.pid)
        before = engine.pid
        made = [c.tokens for c in engine.generate(ASKED[:20], proof=PROOF)]
        assert made == [c.tokens for c in reference.generate(ASKED[:20], proof=PROOF)]


def weights_of_another_shape(folder: Path, seed: int) -> None:
    """Give a policy a head that is not tied to its embeddings."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    shape = weights["model.embed_tokens.weight"].shape
    weights["lm_head.weight"] = 0.15 * torch.randn(shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with_config(folder, lambda config: config.update(tie_word_embeddings=False))


def test_prefix_cache_gives_the_rows_of_the_whole_prompt(
    engine: VllmEngine, policies: list[Path]
) -> None:
    prompt = tuple(2 + i % 50 for i in range(CONTEXT - 30))
    reference = TransformersEngine()
    reference.load_policy(policies[0], PolicyVersion(0))
    first, second = (
        engine.generate([Request(prompt, seed, 1.0, 30) for seed in seeds], proof=PROOF)
        for seeds in (range(4), range(2, 6))
    )
    # Seeds 2 and 3 were asked twice, the second time with the prompt in the cache.
    assert first[2:] == second[:2]
    expected = reference.generate([Request(prompt, 5, 1.0, 30)], proof=PROOF)
    assert second[3].tokens == expected[0].tokens
