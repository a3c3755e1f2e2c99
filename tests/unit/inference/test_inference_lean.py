"""Lean decoding gives the model's own numbers, for known families of unchanged code."""

import gc
import logging
import weakref
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference_policy import EOS, build_policy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from muster.inference import (
    lean_model as lean_model_module,
    lean_prefill,
    lean_rows as lean_rows_module,
    substitutes,
)
from muster.inference.engine import Request
from muster.inference.forward import Forward, pad_right
from muster.inference.lean_model import LeanModel
from muster.inference.lean_prefill import plan_passes, predicting_rows
from muster.inference.lean_rows import LeanRows, try_lean
from muster.inference.policy_files import keep_caps
from muster.inference.step_graphs import Work
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import ProofRecipe

COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": EOS,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

LOCAL = "sliding_attention"

KNOWN = {
    "llama": LlamaConfig(**COMMON),
    "llama with biases": LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama 3 positions": LlamaConfig(**COMMON, rope_parameters=LLAMA3),
    "yarn positions": Qwen3Config(**COMMON, head_dim=8, rope_parameters=YARN),
    "mistral": MistralConfig(**COMMON, sliding_window=None),
    "qwen2": Qwen2Config(**COMMON),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
    "qwen3 tied": Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True),
    "one key head": Qwen3Config(**{**COMMON, "num_key_value_heads": 1}, head_dim=16),
    "gemma2": Gemma2Config(**COMMON, head_dim=256, sliding_window=5, query_pre_attn_scalar=20),
    "gemma2 without caps": Gemma2Config(
        **COMMON, head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3": Gemma3TextConfig(
        **COMMON, head_dim=256, sliding_window=4, layer_types=[LOCAL, "full_attention", LOCAL]
    ),
    "a window": MistralConfig(**COMMON, sliding_window=4),
    "some windows": Qwen3Config(
        **COMMON, head_dim=16, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "as many key heads": Qwen3Config(**{**COMMON, "num_key_value_heads": 4}, head_dim=16),
}

UNKNOWN = {
    "another family": GPTNeoXConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    ),
    "another way to see": Gemma3TextConfig(**COMMON, head_dim=8, use_bidirectional_attention=True),
}


def built(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> tuple[Any, Forward]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(config))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    model.to(dtype).eval().requires_grad_(False)
    keep_caps(model)
    return model, Forward(model)


def lean_of(config: PretrainedConfig) -> tuple[LeanModel, Forward]:
    model, forward = built(config)
    lean = try_lean(model, forward)
    assert lean is not None
    return lean, forward


def own_rows(forward: Forward, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = pad_right(rows)
    hidden, logits = forward(tokens, keep=tokens.shape[1])
    lasts = [len(row) - 1 for row in rows]
    return hidden[range(len(rows)), lasts], logits[range(len(rows)), lasts]


class Tape(TorchDispatchMode):
    """Records operations as a CUDA graph does: a replay repeats them on the same tensors, which the
    recording does not keep alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replays: list[int] = []
        self._done: list[tuple[Any, Any]] = []
        self._made: dict[int, int] = {}
        self._all_made: list[Any] = []

    def record(self, work: Work) -> Work:
        number = len(self.replays)
        self.replays.append(0)
        with self:
            work()
        done = self._done
        self._done, self._made, self._all_made = [], {}, []

        def replay() -> None:
            self.replays[number] += 1
            made: list[Any] = []
            for operation, given in done:
                args, kwargs = tree_map(partial(_present, made), given)
                made += tree_leaves(operation(*args, **kwargs))

        return replay

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._done.append((operation, tree_map(self._held, (args, kwargs or {}))))
        found = operation(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            self._made[id(each)] = len(self._all_made)
            # Kept while work is recorded, so that no other tensor gets its id.
            self._all_made.append(each)
        return found

    def _held(self, given: Any) -> Any:
        if not isinstance(given, torch.Tensor):
            return given
        return _Made(self._made[id(given)]) if id(given) in self._made else weakref.ref(given)


@dataclass(frozen=True)
class _Made:
    place: int


def _present(made: list[Any], held: Any) -> Any:
    """Return the arguments of an operation when it is replayed."""
    if isinstance(held, _Made):
        return made[held.place]
    if not isinstance(held, weakref.ref):
        return held
    tensor = held()
    assert tensor is not None, "what was recorded has been freed"
    return tensor


@pytest.mark.parametrize("is_recorded", [False, True], ids=["computed", "replayed"])
@pytest.mark.parametrize("name", KNOWN)
@torch.inference_mode()
def test_rows_compute_what_the_model_does(name: str, is_recorded: bool) -> None:
    lean, forward = lean_of(KNOWN[name])
    rows = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
    tape = Tape()
    decoding = LeanRows(lean, 5, 40, tape.record if is_recorded else None)
    found = decoding.admit([tuple(row) for row in rows])
    draw = np.random.default_rng(0)
    for step in range(25):
        for ours, own in zip(found, own_rows(forward, rows), strict=True):
            assert torch.allclose(ours, own, atol=2e-4)
        if step == 5:
            decoding.keep(np.array([0, 2]))
            rows = [rows[0], rows[2]]
        if step == 9:
            later = [[7, 7, 7, 2], [6, 5, 3, 5, 8, 9, 7], [7, 7, 7, 2]]
            for ours, own in zip(
                decoding.admit([tuple(row) for row in later]), own_rows(forward, later), strict=True
            ):
                assert torch.allclose(ours, own, atol=2e-4)
            rows += later
        if step == 15:
            decoding.keep(np.array([4, 1, 3]))
            rows = [rows[4], rows[1], rows[3]]
        tokens = draw.integers(0, 40, len(rows))
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.append(token)
        found = decoding.step(tokens)
    # Recordings of four places, of two and of five; the first steps of each are not replayed.
    assert tape.replays == ([12, 1, 3] if is_recorded else [])


SAMPLES = [
    ((3, 1, 4), (1, 5, 9, 2, 6)),
    ((2, 7), (1,)),
    ((3, 1, 4), (8,)),
    ((3, 1, 4), tuple(range(17))),
    ((5,), (3, 5)),
]


def plain_flash(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *ends: Any,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """A GPU kernel's result, computed sequence by sequence."""
    asking, asked, longest_asking, longest_asked = ends
    assert [longest_asking, longest_asked] == [int(each.diff().max()) for each in ends[:2]]
    made = []
    for one, other in zip(asking.unfold(0, 2, 1), asked.unfold(0, 2, 1), strict=True):
        parts = queries[slice(*one)], keys[slice(*other)], values[slice(*other)]
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        mask = lean_prefill._mask(q.shape[2], k.shape[2], window, q.device)
        made.append(lean_prefill.mix(q, k, v, mask, scale=scale, cap=None)[0].transpose(0, 1))
    return torch.cat(made)


@pytest.mark.parametrize("blocks", ["small", "large", "at once"])
@pytest.mark.parametrize("name", KNOWN)
@torch.inference_mode()
def test_samples_are_examined_as_the_model_computes_them(
    name: str, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks == "at once":
        monkeypatch.setattr(lean_prefill, "has_flash", lambda model: model.cap is None)
        monkeypatch.setattr(lean_prefill, "flash", plain_flash)
    if blocks == "small":
        monkeypatch.setattr(lean_model_module, "BLOCK_ROWS", 7)
        monkeypatch.setattr(lean_prefill, "_QUERY_ROWS", 3)
    lean, forward = lean_of(KNOWN[name])
    for (prompt, completion), found in zip(SAMPLES, predicting_rows(lean, SAMPLES), strict=True):
        tokens = np.array([[*prompt, *completion[:-1]]])
        own = forward.hidden(tokens, keep=len(completion))[0]
        assert torch.allclose(found, own, atol=2e-4)


@pytest.mark.parametrize("name", KNOWN)
@torch.inference_mode()
def test_samples_are_examined_between_replayed_steps(name: str) -> None:
    lean, forward = lean_of(KNOWN[name])
    row, tape = [3, 1, 4], Tape()
    decoding = LeanRows(lean, 1, 40, tape.record)
    decoding.admit([tuple(row)])
    for token in range(12):
        row.append(token)
        hidden, _ = decoding.step(np.array([token]))
        predicting_rows(lean, SAMPLES)
        assert torch.allclose(hidden, own_rows(forward, [row])[0], atol=2e-4)
    assert tape.replays == [9]


@torch.inference_mode()
def test_a_replayed_decode_is_freed_when_it_is_over() -> None:
    def record_once(work: Work) -> Work:
        work()
        return lambda: None

    lean, _ = lean_of(KNOWN["qwen3"])
    decoding = LeanRows(lean, 1, 40, record_once)
    decoding.admit([(1, 2)])
    for token in range(6):
        decoding.step(np.array([token]))
    held = weakref.ref(decoding)
    gc.disable()
    try:
        del decoding
        assert held() is None
    finally:
        gc.enable()


def test_a_pass_holds_a_prompt_once() -> None:
    assert plan_passes(SAMPLES, 1000) == [[4, 1, 0, 2, 3]]
    # 3 tokens, 3, 3 + 5, 1, 17.
    assert plan_passes(SAMPLES, 15) == [[4, 1, 0, 2], [3]]
    assert plan_passes(SAMPLES, 1) == [[4], [1], [0], [2], [3]]
    assert plan_passes([], 15) == []


@torch.inference_mode()
def test_a_prompt_is_examined_once_for_all_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    lean, _ = lean_of(KNOWN["qwen3"])
    computed: list[int] = []
    own = LeanModel.run

    def counted(self: LeanModel, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        computed.append(len(tokens))
        return own(self, tokens, *rest)

    monkeypatch.setattr(LeanModel, "run", counted)
    predicting_rows(lean, SAMPLES)
    # Prompts of 3, 2 and 1 tokens, and completions without their last ones.
    assert computed == [3 + 2 + 1 + 4 + 0 + 0 + 16 + 1]


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@torch.inference_mode()
def test_bfloat16_rows_differ_by_rounding_only(key_heads: int) -> None:
    config = Qwen3Config(**{**COMMON, "num_key_value_heads": key_heads}, head_dim=16)
    model, forward = built(config, torch.bfloat16)
    lean = try_lean(model, forward)
    assert lean is not None
    rows = [[3, 1, 4, 1, 5], [9, 2]]
    decoding = LeanRows(lean, 2, 20)
    decoding.admit([tuple(row) for row in rows])
    for token in range(5):
        rows = [[*row, token] for row in rows]
        hidden, _ = decoding.step(np.array([token, token]))
        own, _ = own_rows(forward, rows)
        assert (hidden - own).float().norm() < 0.02 * own.float().norm()


@torch.inference_mode()
def test_prompts_beyond_one_pass_are_computed_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_rows_module, "PROMPT_TOKENS", 8)
    lean, forward = lean_of(KNOWN["qwen3"])
    rows = [[1, 2], [3, 4, 5], [1, 2], [6] * 12, [7, 8, 9]]
    hidden, logits = LeanRows(lean, 5, 20).admit([tuple(row) for row in rows])
    own_hidden, own_logits = own_rows(forward, rows)
    assert torch.allclose(hidden, own_hidden, atol=2e-4)
    assert torch.allclose(logits, own_logits, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_computes_the_same_after_its_weights_are_laid_out(dtype: torch.dtype) -> None:
    model, forward = built(KNOWN["llama with biases"], dtype)
    tokens = np.array([[5, 6, 7, 8]])
    with torch.inference_mode():
        before = forward(tokens, keep=4)[1]
    names = {name: weight.clone() for name, weight in model.named_parameters()}
    assert try_lean(model, forward) is not None
    assert all(torch.equal(weight, names[n]) for n, weight in model.named_parameters())
    with torch.inference_mode():
        assert torch.allclose(forward(tokens, keep=4)[1], before, atol=1e-5)


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_models_decode_through_their_own_forward_pass(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert try_lean(*built(UNKNOWN[name])) is None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "own forward pass" in record.message


@pytest.mark.parametrize("change", ["scale", "rotary", "missing"])
def test_arithmetic_that_is_not_the_models_is_refused(
    change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, forward = built(KNOWN["qwen3"])
    if change == "scale":
        monkeypatch.setattr(lean_model_module.F, "rms_norm", lambda x, *_: 1.1 * x)
    elif change == "rotary":
        own = LeanModel.begin
        monkeypatch.setattr(LeanModel, "begin", lambda self, length: own(self, length).at([0] * 8))
    else:
        del model.model.layers[1].self_attn.o_proj
    assert try_lean(model, forward) is None
    assert caplog.records[-1].levelno == logging.WARNING


def decodes_lean(engine: TransformersEngine) -> bool:
    return isinstance(engine._rows_for(1, 6), LeanRows)


@pytest.mark.parametrize(
    "change",
    [substitutes.first_layers, substitutes.rounded_cache(8), substitutes.without_unlikely(0.1)],
)
def test_changed_model_is_decoded_as_it_is(engine: TransformersEngine, change: Any) -> None:
    assert decodes_lean(engine)
    with change(engine.model, 0):
        assert not decodes_lean(engine)
    assert decodes_lean(engine)


def test_other_attention_kernel_is_used_when_asked_for(engine: TransformersEngine) -> None:
    engine.model.set_attn_implementation("eager")
    assert not decodes_lean(engine)
    engine.model.set_attn_implementation("sdpa")
    engine.lean = False
    assert not decodes_lean(engine)


def test_changed_weights_are_decoded(engine: TransformersEngine) -> None:
    asked = [Request((1, 2, 3), seed, 1.0, 20) for seed in range(8)]
    before = engine.generate(asked, proof=ProofRecipe())
    with substitutes.noise(0.5)(engine.model, 0):
        changed = engine.generate(asked, proof=ProofRecipe())
        engine.lean = False
        assert [c.tokens for c in changed] == [
            c.tokens for c in engine.generate(asked, proof=ProofRecipe())
        ]
        engine.lean = True
    assert [c.tokens for c in changed] != [c.tokens for c in before]
    assert engine.generate(asked, proof=ProofRecipe()) == before


@pytest.mark.parametrize(("max_rows", "rows"), [(256, 6), (4, 4)])
def test_rows_are_bounded_before_generation(
    engine: TransformersEngine, max_rows: int, rows: int
) -> None:
    engine.max_rows = max_rows
    assert engine._rows_for(6, 6).room() == rows


@pytest.mark.parametrize(("rows_of_memory", "rows"), [(0, 1), (1, 1), (3, 3), (99, 6)])
def test_keys_and_values_stay_within_their_memory(
    policy_folder: Path, rows_of_memory: int, rows: int
) -> None:
    # 2 layers x keys and values x 1 head x 32 x 4 bytes, 6 positions.
    per_row = 2 * 2 * 32 * 4 * 6
    engine = TransformersEngine(cache_bytes=max(1, rows_of_memory * per_row))
    engine.load_policy(policy_folder, PolicyVersion(0))
    asked = [Request((1, 2), seed, 1.0, 4) for seed in range(6)]
    assert engine._rows_for(6, 6).room() == rows
    assert len(engine.generate(asked, proof=ProofRecipe())) == 6


def test_a_prompt_is_computed_once_for_all_its_samples(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[int, ...]] = []
    own = LeanRows._compute

    def counted(self: LeanRows, prompts: list[tuple[int, ...]]) -> Any:
        computed.extend(prompts)
        return own(self, prompts)

    monkeypatch.setattr(LeanRows, "_compute", counted)
    engine.max_rows = 3
    prompts = [(1, 2), (3, 4), (5, 6, 7)]
    asked = [Request(prompts[i % 3], i, 1.0, 1 + i % 9) for i in range(24)]
    engine.generate(asked, proof=ProofRecipe())
    assert sorted(computed) == sorted(prompts)


def test_finished_rows_leave_their_room_to_others(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    own = LeanRows.step

    def counted(self: LeanRows, tokens: Any) -> Any:
        steps.append(len(tokens))
        return own(self, tokens)

    monkeypatch.setattr(LeanRows, "step", counted)
    engine.max_rows = 4
    # All tokens are about as likely, so completions end at their limits.
    asked = [Request((1, 2), i, 1.0, 30 if i == 0 else 5) for i in range(16)]
    made = engine.generate(asked, proof=ProofRecipe())
    tokens = sum(len(c.tokens) for c in made)
    assert sum(steps) == tokens - len(made)
    # Without refilled rows, each batch would take as many steps as its longest sample.
    assert len(steps) <= max(30, tokens // 3)


def test_untied_and_tied_policies_swap_in_place(tmp_path: Path) -> None:
    for tied in (True, False):
        folder = build_policy(tmp_path / f"{tied}", training_steps=0, tied=tied)
        engine = TransformersEngine()
        engine.load_policy(folder, PolicyVersion(0))
        model = engine.model
        engine.load_policy(folder, PolicyVersion(1))
        assert engine.model is model
        assert decodes_lean(engine)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_a_head_that_caps_its_logits_is_not_decoded_lean(
    cap: float, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = built(KNOWN["llama"])
    own = model.forward

    def capped(**arguments: Any) -> Any:
        output = own(**arguments)
        output.logits = cap * torch.tanh(output.logits / cap)
        return output

    model.forward = capped
    with caplog.at_level(logging.WARNING):
        assert try_lean(model, Forward(model)) is None
    assert "its head by" in caplog.text
    model.forward = own
    assert try_lean(model, Forward(model)) is not None


@pytest.mark.parametrize("cap", [None, 49.0, 51.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_cap_of_attention_is_refused(
    cap: float | None, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model, forward = built(KNOWN["gemma2"], dtype)
    assert try_lean(model, forward) is not None
    # Layers keep the values that they were built with.
    model.config.attn_logit_softcapping = cap
    with caplog.at_level(logging.WARNING):
        assert try_lean(model, forward) is None
    assert "its attention by" in caplog.text


def test_a_kernel_without_caps_is_not_taken_for_the_model() -> None:
    model, forward = built(KNOWN["gemma2"])
    model.set_attn_implementation("sdpa")
    assert try_lean(model, forward) is None
    keep_caps(model)
    assert try_lean(model, forward) is not None


@pytest.mark.parametrize("window", [3, 5])
def test_another_window_is_refused(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = lean_prefill._mask
    monkeypatch.setattr(lean_prefill, "_mask", lambda q, k, w, d: own(q, k, w and window, d))
    refused = try_lean(*built(KNOWN["gemma3"]))
    assert (refused is None) == (window != lean_rows_module._WINDOW)
