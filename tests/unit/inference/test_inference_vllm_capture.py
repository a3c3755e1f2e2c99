"""Hidden states from a model runner under any scheduling; vLLM itself is not needed."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from worlds.replays import replay_sample

from muster.inference.engine import Sample
from muster.inference.vllm.capture import ChosenRows, HiddenStates, PromptRows, Unprovable
from muster.inference.vllm.frames import PolicyShape
from muster.protocol.errors import ProofError
from muster.protocol.recipe import ProofRecipe
from muster.toploc import build_proofs

H = 40


def rows_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed))


def step(chosen: torch.Tensor, requests: Sequence[str], parts: Sequence[bool]) -> tuple[Any, Any]:
    """A model runner after a step, and its state: one row per request."""
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=list(requests)),
        # vLLM's buffer is as long as the largest batch.
        discard_request_mask=SimpleNamespace(np=np.array([*parts, True, True])),
    )
    return runner, SimpleNamespace(sample_hidden_states=chosen)


def counted(rows: ChosenRows, name: str) -> int:
    return rows._rows[rows._slots[name]] if name in rows._slots else 0


def test_rows_of_a_changing_batch_become_each_requests_proofs() -> None:
    own = {name: rows_of(count, seed) for seed, (name, count) in enumerate([("a", 6), ("b", 3)])}
    rows = ChosenRows("ab", ProofRecipe(chunk_tokens=2, topk=8), "cpu")
    # x is not one of ours. b joins late, and its prompt is computed in two parts; a is preempted
    # for a step; b ends first.
    own["x"] = rows_of(1, 9)
    for present in (["a"], ["x", "a", "b?"], ["b", "x", "a"], ["b"], ["a", "b"], ["a", "x"], ["a"]):
        names = [name[0] for name in present]
        taken = {name: counted(rows, name) for name in names}
        chosen = torch.stack([own[name][taken[name]] for name in names])
        rows.see(*step(chosen, names, [name.endswith("?") for name in present]))
    for name in "ba":
        ((count, proofs),) = rows.take([name])
        assert count == len(own[name])
        assert proofs == build_proofs(own[name], chunk_tokens=2, topk=8)
    assert "x" not in rows._slots
    rows.close()


def test_places_are_used_again() -> None:
    rows = ChosenRows("ab", ProofRecipe(chunk_tokens=2, topk=8), "cpu")
    for seed in range(5):
        own = rows_of(3, seed)
        for row in own:
            rows.add([str(seed)], row[None])
        assert rows.take([str(seed)]) == [(3, build_proofs(own, chunk_tokens=2, topk=8))]
    assert len(rows._rows) == 1
    rows.close()


def test_bfloat16_rows_are_proven_as_they_are() -> None:
    own = rows_of(4).to(torch.bfloat16)
    rows = ChosenRows("ab", ProofRecipe(chunk_tokens=2, topk=8), "cpu")
    for row in own:
        rows.add(["a"], row[None])
    assert rows.take(["a"]) == [(4, build_proofs(own, chunk_tokens=2, topk=8))]
    rows.close()


def test_nonsense_is_told_when_the_request_ends_not_in_the_middle_of_a_step() -> None:
    rows = ChosenRows("ab", ProofRecipe(chunk_tokens=1, topk=8), "cpu")
    rows.add(["a"], torch.full((1, H), float("nan")))
    with pytest.raises(ProofError, match="NaN"):
        rows.take(["a"])
    rows.add(["b"], rows_of(1))
    with pytest.raises(ProofError, match="NaN"):
        rows.take(["b"])
    rows.close()


def test_rows_that_are_not_one_per_request_are_a_failure() -> None:
    rows = ChosenRows("ab", ProofRecipe(chunk_tokens=2, topk=8), "cpu")
    with pytest.raises(RuntimeError, match="2 rows for 1 requests"):
        rows.see(*step(rows_of(2), ["a"], [False]))
    rows.close()


def test_prompt_rows_come_in_parts_and_again_after_a_preemption() -> None:
    own = rows_of(12)
    rows = PromptRows({"a": (4, 10)})
    for position, end in ((0, 6), (0, 3), (3, 8), (8, 12)):
        rows.add("a", position, own[position:end])
        rows.add("b", position, own[position:end])
    assert torch.equal(rows.rows("a"), own[4:10])


def test_prompt_rows_are_found_by_their_place_in_the_step() -> None:
    own = {"a": rows_of(3, 1), "b": rows_of(5, 2)}
    rows = PromptRows({"a": (1, 3), "b": (2, 7)})
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=["b", "x", "a"], num_computed_tokens_cpu=np.array([2, 9, 0])
        )
    )
    state = SimpleNamespace(
        hidden_states=torch.cat([own["b"], rows_of(2, 3), own["a"], rows_of(4, 4)]),
        scheduler_output=SimpleNamespace(num_scheduled_tokens={"a": 3, "b": 5, "x": 2}),
    )
    rows.see(runner, state)
    assert torch.equal(rows.rows("a"), own["a"][1:])
    assert torch.equal(rows.rows("b"), own["b"])


@pytest.mark.parametrize("positions", [(0, 6), (7, 12)])
def test_missing_prompt_rows_are_never_passed_over(positions: tuple[int, int]) -> None:
    own = rows_of(12)
    rows = PromptRows({"a": (4, 12)})
    rows.add("a", 0, own[: positions[0]])
    # Position 6, say, was found in a cache and not computed.
    rows.add("a", positions[1], own[positions[1] :])
    with pytest.raises(RuntimeError, match="rows of a prompt were seen"):
        rows.rows("a")


def test_rows_are_copied_out_of_memory_that_the_next_step_overwrites() -> None:
    memory = rows_of(4)
    first = memory.clone()
    rows = PromptRows({"a": (0, 4)})
    rows.add("a", 0, memory)
    memory.zero_()
    assert torch.equal(rows.rows("a"), first)


class Runner:
    """A model runner whose steps return given results."""

    def __init__(self) -> None:
        self.execute_model_state: Any = None
        self.input_batch = SimpleNamespace(req_ids=["a"])
        self.discard_request_mask = SimpleNamespace(np=np.array([False]))
        self.device = torch.device("cpu")
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden[:, :3] * 2)

    def execute_model(self, state: Any) -> str:
        self.execute_model_state = state
        return "output"


def test_extension_watches_every_step_for_those_who_asked() -> None:
    extension = HiddenStates()
    extension.model_runner = runner = Runner()
    extension.muster_watch()
    own = rows_of(3)
    states = [SimpleNamespace(sample_hidden_states=row[None]) for row in own]
    assert runner.execute_model(states[0]) == "output"
    extension.muster_generate(7, ["a"], 2, 8)
    extension.muster_generate(8, ["b"], 2, 8)
    for state in (states[1], None, states[2]):
        assert runner.execute_model(state) == "output"
    assert extension.muster_take(7, ["a"]) == [(2, build_proofs(own[1:], chunk_tokens=2, topk=8))]
    extension.muster_rest(7)
    assert not extension.muster_captures[8]._slots
    extension.muster_rest(8)
    assert runner.execute_model(states[0]) == "output"
    extension.muster_rest(7)


def test_extension_returns_what_is_no_number() -> None:
    extension, proof = HiddenStates(), ProofRecipe(chunk_tokens=2, topk=8)
    extension.model_runner = Runner()
    extension.muster_watch()
    extension.muster_prefill(0, {"a": (0, 2)})
    extension.muster_captures[0].add("a", 0, torch.full((2, H), float("nan")))
    extension.muster_generate(1, ["a"], 2, 8)
    extension.muster_captures[1].add(["a"], torch.full((1, H), float("inf")))
    sample, shape = Sample((1,), (0, 1), 7, [bytes(34)]), PolicyShape(H, 3, frozenset({2}), 64)
    returned = [
        extension.muster_build(0, "a", proof),
        extension.muster_examine(0, "a", sample, shape, proof, 1.0),
        extension.muster_take(1, ["a"]),
    ]
    assert [type(each) for each in returned] == [Unprovable] * 3
    extension.muster_rest(1)


def test_extension_examines_the_kept_rows() -> None:
    extension, proof = HiddenStates(), ProofRecipe(chunk_tokens=2, topk=8)
    extension.model_runner = Runner()
    extension.muster_watch()
    extension.muster_prefill(0, {"a": (1, 4)})
    own = rows_of(4)
    extension.muster_captures[0].add("a", 0, own)
    proofs = extension.muster_build(0, "a", proof)
    assert proofs == build_proofs(own[1:], chunk_tokens=2, topk=8)
    shape = PolicyShape(H, 3, frozenset({2}), 64)
    sample = Sample((1, 2), (0, 1, 2), 7, proofs)
    found = extension.muster_examine(0, "a", sample, shape, proof, 0.5)
    logits = (own[1:, :3] * 2).numpy()
    margins, expected = replay_sample(logits, (0, 1, 2), 7, 0.5)
    assert found.replayed.margins_T.tolist() == margins.tolist()
    assert found.replayed.expected_T.tolist() == expected.tolist()
    assert [chunk.exponent_mismatches for chunk in found.chunks] == [0, 0]
    extension.muster_drop(0, "a")
    extension.muster_rest(0)
