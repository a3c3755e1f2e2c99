"""The engine on Hugging Face transformers: any causal language model, with its own decode loop.

Owns the loaded policy and the size of a pass. `muster.inference.decode_loop` generates, on
`muster.inference.lean_rows` where the architecture is known there, through the model's own forward
pass otherwise. Axes: R rows, L width, T completion tokens, H hidden units, V vocabulary.
"""

import gc
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch

from muster.inference.blocks import examine_rows
from muster.inference.decode_loop import Decode, DecodingRows
from muster.inference.device_proofs import build_proofs
from muster.inference.engine import (
    ROOM,
    Completion,
    Examined,
    Request,
    Room,
    Sample,
    Watch,
    require_fits,
    require_samplable,
    set_aside_in,
)
from muster.inference.examining import Recomputed
from muster.inference.forward import (
    Forward,
    Tokens,
    WholeBatch,
    pad_right,
    plan_prefill,
)
from muster.inference.lean_model import LeanModel
from muster.inference.lean_prefill import plan_passes, predicting_rows
from muster.inference.lean_rows import LeanRows, try_lean
from muster.inference.policy_files import (
    LoadedPolicy,
    as_engine_error,
    fingerprint,
    load_folder,
    swap_weights,
    to_engine_error,
)
from muster.inference.products import quicken
from muster.inference.prompts import decode_completion, encode_prompt
from muster.inference.step_graphs import record_cuda
from muster.inference.turns import Turn, Weights
from muster.protocol.errors import EngineError, ProofError
from muster.protocol.ids import PolicyVersion
from muster.protocol.prompts import Prompt
from muster.protocol.recipe import ProofRecipe
from muster.protocol.set_aside import NOTHING, SetAside
from muster.toploc.chunks import to_patterns

logger = logging.getLogger(__name__)

_LED_STEPS = 16
"""Steps that one call takes for all before it reports progress and another call takes over."""

_CPU_TOKENS = 1 << 11
"""Tokens of one batch of a model's own forward pass on a CPU: with more, activations do not fit
into its caches, which takes a fifth more time (width 256)."""

_PASS_TOKENS = 1 << 14
"""Most tokens of one lean pass on a CPU."""

_PASS_BYTES = 256 << 20
"""Most bytes of hidden states, queries, keys and values of all positions in that pass."""

_DEVICE_TOKENS = 1 << 16
"""Most tokens of one batch on an accelerator."""

_DEVICE_ACTIVATIONS = 2 << 30
"""Most bytes of a layer's activations in that batch, unless it is one sample."""


class TransformersEngine:
    """InferenceEngine on transformers; see `muster.inference.engine` for the contract.

    `threads` sets torch's thread count for the whole process. `room` bounds the samples of one
    forward pass. `room`, or `cache_bytes` if given, bounds the keys and values of a lean decode:
    there is room for one sample at least, and the others wait. Without `lean`, every architecture
    is decoded through its own forward pass.
    """

    def __init__(
        self,
        dtype: Literal["float32", "bfloat16"] = "float32",
        *,
        threads: int = 1,
        device: str = "cpu",
        room: Room = ROOM,
        cache_bytes: int | None = None,
        lean: bool = True,
    ) -> None:
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self._device = device
        self.max_rows = room.max_rows
        self._room = room
        self.dtype = dtype
        self.lean = lean
        self._cache_bytes = cache_bytes
        self._memory_bytes: int | None = None
        self._policy: LoadedPolicy | None = None
        self._forward: Forward | None = None
        self._lean: LeanModel | None = None
        self._version: PolicyVersion | None = None
        self._set_aside = NOTHING
        self._turn = Turn()
        self._decodes: list[Decode] = []
        # Weights must not change during a generation, or its proofs would not verify.
        self._weights = Weights()
        self._reading = threading.Lock()
        torch.set_num_threads(threads)

    @property
    def policy_version(self) -> PolicyVersion | None:
        """The loaded policy; None before the first and after a failed load."""
        return self._version

    @property
    def model(self) -> Any:
        """The transformers model; calibration perturbs its weights."""
        return self._loaded()[0].model

    @property
    def forward(self) -> Forward:
        """The model's forward pass; calibration feeds it in other ways."""
        return self._loaded()[1]

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""
        return self._loaded()[1].hidden_size

    @property
    def vocab_size(self) -> int:
        """Logits per position; token ids are below it."""
        return self._loaded()[1].vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a completion."""
        return self._loaded()[0].eos_token_ids

    @property
    def set_aside(self) -> SetAside:
        """The problems that the loaded policy sets aside."""
        self._loaded()
        return self._set_aside

    def load_policy(self, folder: Path, version: PolicyVersion) -> None:
        """Load a policy folder, in place when only weights differ from the loaded policy's."""
        if not folder.is_dir():
            raise EngineError(f"no policy folder at {folder}")
        unusable = as_engine_error(f"policy folder {folder} is unusable")
        with self._weights.replaced(), self._turn, unusable:
            # No policy until the new one is complete: a mixture must never generate.
            self._version = None
            self._set_aside = set_aside_in(folder)
            in_place = (
                self._policy is not None
                and self._policy.fingerprint == fingerprint(folder)
                and swap_weights(self._policy.model, folder)
            )
            if not in_place:
                if self._memory_bytes is None:
                    self._memory_bytes = self._share_of_memory()
                self._free_model()
                self._policy = load_folder(folder, dtype=self._dtype, device=self._device)
                quicken(self._policy.model)
                self._forward = Forward(self._policy.model)
                self._lean = try_lean(self._policy.model, self._forward)
            self._version = version
        logger.info("policy loaded", extra={"policy_version": version, "in_place": in_place})

    def _free_model(self) -> None:
        """Free the former model's memory: there may be no room for two."""
        self._policy = self._forward = self._lean = None
        gc.collect()
        torch.cuda.empty_cache()

    def encode(self, text: Prompt, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the token ids of a prompt, which may stand within a sequence."""
        policy, _ = self._loaded()
        with self._reading, as_engine_error("the policy's tokenizer does not encode a prompt"):
            return encode_prompt(policy.tokenizer, text, is_start=is_start)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion without EOS and special tokens."""
        policy, _ = self._loaded()
        with self._reading, as_engine_error("the policy's tokenizer does not decode a completion"):
            return decode_completion(policy.tokenizer, tokens, policy.eos_token_ids)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        proof: ProofRecipe,
        watch: Watch | None = None,
        due: int = 0,
    ) -> list[Completion]:
        """Return the completions in the order asked."""
        with self._weights.used():
            with self._computing():
                for request in requests:
                    require_samplable(request)
                    self._require_fits(request.prompt_tokens, request.max_new_tokens)
                if not requests:
                    return []
                decode = self._decode_for(requests, proof)
                call = decode.begin(requests, due)
            try:
                while not call.is_over:
                    self._take_steps(decode)
                    if watch is not None and not call.is_over:
                        watch(decode.progress(call))
                with _computed(), _sound():
                    return decode.finish(call)
            finally:
                with self._turn, torch.inference_mode():
                    decode.leave(call)
                    if not decode.calls:
                        self._decodes.remove(decode)
                        decode.close()

    def _take_steps(self, decode: Decode) -> None:
        """Take some steps for all calls; stop early when one of them is over."""
        with decode.lead:
            for _ in range(_LED_STEPS):
                with self._computing(), _sound():
                    is_one_over = decode.step()
                if is_one_over:
                    return

    def examine(
        self, samples: Sequence[Sample], *, proof: ProofRecipe, temperature: float
    ) -> list[Examined]:
        """Return what the policy shows of every sample."""
        made: dict[int, Examined] = {}
        with self._computing() as (policy, forward):
            pairs = [(each.prompt_tokens, each.completion_tokens) for each in samples]
            lean = self._lean_now()
            for batch, hidden in self._prefilled(pairs):
                found = examine_rows(
                    [samples[i] for i in batch],
                    hidden,
                    forward.logits if lean is None else lean.logits,
                    vocab_size=forward.vocab_size,
                    eos=policy.eos_token_ids,
                    proof=proof,
                    temperature=temperature,
                )
                made.update(zip(batch, found, strict=True))
        return [made[i] for i in range(len(samples))]

    def prove(
        self, samples: Sequence[tuple[Tokens, Tokens]], *, proof: ProofRecipe
    ) -> list[list[bytes]]:
        """Return the TOPLOC proofs of every (prompt, completion)."""
        made: dict[int, list[bytes]] = {}
        with self._computing(), _sound():
            for batch, hidden in self._prefilled(samples):
                built = build_proofs(hidden, proof)
                made.update(zip(batch, built, strict=True))
        return [made[i] for i in range(len(samples))]

    def passes(
        self, samples: Sequence[tuple[Tokens, Tokens]]
    ) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """Yield places of samples and their hidden states [T, H], one forward pass at a time;
        calibration looks at each in several ways.
        """
        with self._computing():
            yield from self._prefilled(samples)

    def recompute(self, samples: Sequence[tuple[Tokens, Tokens]]) -> list[Recomputed]:
        """Return hidden states and logits of samples that are small enough to hold; calibration
        compares models by them.
        """
        made: dict[int, Recomputed] = {}
        with self._computing() as (_, forward):
            for batch, hidden in self._prefilled(samples):
                for i, hidden_TH in zip(batch, hidden, strict=True):
                    logits_TV = forward.logits(hidden_TH).cpu().numpy()
                    made[i] = Recomputed(to_patterns(hidden_TH), logits_TV)
        return [made[i] for i in range(len(samples))]

    def _prefilled(
        self, samples: Sequence[tuple[Tokens, Tokens]]
    ) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """Yield batches: places of samples, and the hidden states [T, H] of each.

        Raises SampleUnfit, before anything is computed.
        """
        _, forward = self._loaded()
        for prompt, completion in samples:
            self._require_fits(prompt, len(completion), completion)
        lean = self._lean_now()
        for batch in self.plan(samples):
            part = [samples[i] for i in batch]
            yield batch, predicting_rows(lean, part) if lean else _prefill_batch(forward, part)

    def plan(self, samples: Sequence[tuple[Tokens, Tokens]]) -> list[list[int]]:
        """Return the places of the samples of each forward pass, every sample once."""
        if lean := self._lean_now():
            return plan_passes(samples, self._pass_tokens(lean))
        return plan_prefill(samples, self.max_rows, self._batch_tokens())

    def _lean_now(self) -> LeanModel | None:
        """Return the lean model while it computes what the model does."""
        return self._lean if self.lean and self._lean and self._lean.is_intact() else None

    def _pass_tokens(self, lean: LeanModel) -> int:
        if self._room.batch_tokens:
            return self._room.batch_tokens
        is_cpu = lean.device.type == "cpu"
        most, room = (
            (_PASS_TOKENS, _PASS_BYTES) if is_cpu else (_DEVICE_TOKENS, _DEVICE_ACTIVATIONS)
        )
        return min(most, room // lean.pass_bytes_per_token)

    def _batch_tokens(self) -> int:
        if self._room.batch_tokens:
            return self._room.batch_tokens
        policy, forward = self._loaded()
        if forward.device.type == "cpu":
            return _CPU_TOKENS
        config = policy.model.config.get_text_config()
        inner = getattr(config, "intermediate_size", None) or 4 * forward.hidden_size
        values = 4 * inner + 8 * forward.hidden_size
        return min(_DEVICE_TOKENS, _DEVICE_ACTIVATIONS // (values * self._dtype.itemsize))

    def _loaded(self) -> tuple[LoadedPolicy, Forward]:
        if self._policy is None or self._forward is None or self._version is None:
            raise EngineError("no policy is loaded", hint="call load_policy first")
        return self._policy, self._forward

    def _decode_for(self, requests: Sequence[Request], proof: ProofRecipe) -> Decode:
        """Return a decode that takes these requests: one that runs, or else another."""
        policy, forward = self._loaded()
        longest = max(len(r.prompt_tokens) + r.max_new_tokens for r in requests)
        for decode in self._decodes:
            if decode.takes(longest, proof):
                return decode
        # With a stated context, there is room for every later sample too.
        length = self._room.context or longest
        places = self.max_rows if self._room.context else len(requests)
        decode = Decode(
            self._rows_for(places, length),
            length,
            np.isin(np.arange(forward.vocab_size), sorted(policy.eos_token_ids)),
            proof,
            forward.device,
            is_wide=forward.device.type != "cpu",
        )
        self._decodes.append(decode)
        return decode

    def _rows_for(self, places: int, length: int) -> DecodingRows:
        _, forward = self._loaded()
        lean = self._lean_now()
        if lean is None:
            return WholeBatch(forward, self.max_rows, length)
        cache_bytes = self._cache_bytes or self._bytes_left(forward.device)
        fitting = max(1, cache_bytes // (length * lean.bytes_per_token))
        record = record_cuda if forward.device.type == "cuda" else None
        return LeanRows(lean, min(self.max_rows, places, fitting), length, record)

    def _share_of_memory(self) -> int:
        device = torch.device(self._device)
        share = self._room.memory_share or (0.5 if device.type == "cpu" else 0.9)
        return int(share * free_bytes(device))

    def _bytes_left(self, device: torch.device) -> int:
        """Return the bytes of the engine's memory that the weights leave and that are free."""
        assert self._memory_bytes is not None  # a policy is loaded
        weights = sum(int(each.nbytes) for each in self.model.parameters())
        return min(self._memory_bytes - weights, free_bytes(device))

    @contextmanager
    def _computing(self) -> Iterator[tuple[LoadedPolicy, Forward]]:
        with self._turn, torch.inference_mode():
            policy, forward = self._loaded()
            with _computed():
                yield policy, forward

    def _require_fits(self, prompt: Tokens, new_tokens: int, completion: Tokens = ()) -> None:
        policy, forward = self._loaded()
        context = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
        require_fits(
            prompt,
            new_tokens,
            completion,
            vocab_size=forward.vocab_size,
            context=context,
            room=self._room.context,
        )


def free_bytes(device: torch.device) -> int:
    """Return the memory of a device that can be allocated."""
    if device.type == "cuda":
        # Memory that torch keeps from earlier buffers can be used again.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return int(psutil.virtual_memory().available)


@contextmanager
def _computed() -> Iterator[None]:
    """Turn errors of torch and a lack of memory into an EngineError."""
    try:
        yield
    except (EngineError, ProofError):
        raise
    except (RuntimeError, MemoryError) as error:
        raise to_engine_error("inference failed", error) from error


@contextmanager
def _sound() -> Iterator[None]:
    """Turn a ProofError about the engine's own work into an EngineError."""
    try:
        yield
    except ProofError as error:
        raise EngineError(f"the policy computes nonsense: {error}") from error


def _prefill_batch(
    forward: Forward, samples: Sequence[tuple[Tokens, Tokens]]
) -> list[torch.Tensor]:
    # Padding follows the tokens, where causal attention never looks, so no mask is needed.
    tokens_RL = pad_right([(*prompt, *completion[:-1]) for prompt, completion in samples])
    first = min(len(prompt) for prompt, _ in samples) - 1
    window = torch.arange(first, tokens_RL.shape[1], device=forward.device)
    hidden_RNH = forward.hidden(tokens_RL, keep=window)
    rows = []
    for hidden_NH, (prompt, completion) in zip(hidden_RNH, samples, strict=True):
        start = len(prompt) - 1 - first
        rows.append(hidden_NH[start : start + len(completion)])
    return rows
