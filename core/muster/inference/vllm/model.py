"""One policy in vLLM: opens a folder, swaps its weights, generates, examines.

Runs in vLLM's process, and drives vLLM's engine step by step in the callers' threads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from safetensors import SafetensorError, safe_open

from muster.inference.engine import Completion, Examined, Progress, Request, Sample
from muster.inference.policy_files import (
    as_engine_error,
    declared_ends,
    fingerprint,
    read_config,
    read_tokenizer,
    require_fixed_positions,
    require_one_reading,
)
from muster.inference.prompts import decode_completion, encode_prompt
from muster.inference.turns import Turn, Weights
from muster.inference.vllm.capture import Unprovable
from muster.inference.vllm.frames import PolicyShape, Tokens
from muster.protocol.errors import EngineError, ProofError, install_hint
from muster.protocol.prompts import Prompt
from muster.protocol.recipe import ProofRecipe

CPU_CACHE_BYTES = 4 << 30
"""Most bytes of keys and values on a CPU, unless one sample needs more or a share is given."""
GPU_MEMORY_SHARE = 0.9
"""Default share of a GPU's free memory for vLLM."""
_CPU_BLOCK_TOKENS = 32
"""Positions of a cache block on a CPU, the fewest possible: samples can share only whole blocks."""


@dataclass(frozen=True, slots=True)
class Options:
    """How vLLM is to compute."""

    dtype: str
    """Number format of weights and arithmetic."""
    device: str
    """Torch's name of the device; several GPUs with a plus sign between them."""
    context: int | None
    """Tokens of the longest sample to make room for; None for the model's context."""
    memory_share: float | None
    """Part of the free memory that weights, keys and values may take; None to choose."""
    max_rows: int
    """Samples that run at a time."""
    batch_tokens: int
    """Tokens that one step computes at most."""
    cache_bytes: int | None
    """Room for keys and values; None to choose."""
    tensor_parallel: int
    """Devices that every layer is spread over."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Requests that vLLM got together."""

    number: int
    """Number of this run."""
    due: int
    """Runs with a smaller number go first."""
    names: list[str] = field(default_factory=list)
    """vLLM's names of the requests, by place."""
    places: dict[str, int] = field(default_factory=dict)
    """Places of the requests that have not ended, by the names that vLLM was given."""


class HostedPolicy:
    """A policy that vLLM holds."""

    def __init__(self, folder: Path, options: Options) -> None:
        """Open a folder; raises EngineError when vLLM cannot run its model."""
        with as_engine_error(f"policy folder {folder} does not load"):
            self._tokenizer = read_tokenizer(folder)
            self._config = read_config(folder)
        _require_runs_here(self._config, options)
        self._fingerprint = fingerprint(folder)
        self._shapes = _shapes(folder)
        self._llm = _open(folder, self._config, options)
        self._engine = self._llm.llm_engine
        # One thread steps at a time, for all runs.
        self._turn = Turn()
        self._weights = Weights()
        self._reading = threading.Lock()
        self._numbers = count()
        self._ended: dict[str, list[int]] = {}
        self._call("muster_watch")
        self.shape = self._find_shape(folder)

    def swap(self, folder: Path) -> bool:
        """Overwrite the weights with a folder's, if nothing else differs; return whether that was
        so. Waits until runs that were cancelled have ended.

        If anything else differs, nothing is changed. Raises EngineError when the files do not
        parse, or could be read in two ways.
        """
        require_one_reading(folder)
        if fingerprint(folder) != self._fingerprint or _shapes(folder) != self._shapes:
            return False
        with self._weights.replaced():
            self._call("reload_weights", weights_path=str(folder))
            self._call("muster_repack")
            # The cache has keys and values of the former weights.
            if not self._engine.reset_prefix_cache():
                raise RuntimeError("the prefix cache is in use")
        return True

    def encode(self, text: Prompt, *, is_start: bool) -> list[int]:
        """Return the token ids of a prompt, which may stand within a sequence."""
        with self._reading:
            return list(encode_prompt(self._tokenizer, text, is_start=is_start))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a completion without EOS and special tokens."""
        with self._reading:
            return decode_completion(self._tokenizer, tokens, self.shape.eos_token_ids)

    def generate(
        self,
        requests: Sequence[Request],
        proof: ProofRecipe,
        *,
        due: int,
        tick: Callable[[Progress], None],
    ) -> Iterator[tuple[int, Completion]]:
        """Yield every request's place and completion, in the order they end; `tick` gets the
        progress once per step. vLLM's scheduler starts the runs with the smallest `due` first.
        """
        done = ended_tokens = 0
        asked = [(r.prompt_tokens, _sampled(r, self.shape)) for r in requests]
        run = _Run(next(self._numbers), due)

        def begin() -> None:
            self._call("muster_generate", run.number, run.names, proof.chunk_tokens, proof.topk)

        def tell() -> None:
            tick(Progress(ended_tokens + self._running_tokens(run), done, ended_tokens))

        with self._weights.used(), self._running(run, asked, begin):
            for ended in self._steps(run, tell):
                done += len(ended)
                ended_tokens += sum(len(tokens) for _, tokens in ended)
                names = [run.names[place] for place, _ in ended]
                with self._turn:
                    taken = self._call("muster_take", run.number, names)
                for (place, tokens), (rows, proofs) in zip(ended, taken, strict=True):
                    if rows != len(tokens):
                        raise RuntimeError(f"{rows} hidden states for {len(tokens)} tokens")
                    yield place, Completion(tuple(tokens), proofs)

    def prove(
        self,
        samples: Sequence[tuple[Tokens, Tokens]],
        proof: ProofRecipe,
        *,
        tick: Callable[[], None],
    ) -> Iterator[tuple[int, Completion]]:
        """Yield every sample's place and its completion with proofs, in the order they end."""
        for run, place in self._prefilled(samples, tick):
            with self._turn:
                proofs = self._call("muster_build", run.number, run.names[place], proof)
            yield place, Completion(tuple(samples[place][1]), proofs)

    def examine(
        self,
        samples: Sequence[Sample],
        proof: ProofRecipe,
        temperature: float,
        *,
        tick: Callable[[], None],
    ) -> Iterator[tuple[int, Examined]]:
        """Yield every sample's place and findings, in the order they end."""
        pairs = [(sample.prompt_tokens, sample.completion_tokens) for sample in samples]
        for run, place in self._prefilled(pairs, tick):
            asked = (run.names[place], samples[place], self.shape, proof, temperature)
            with self._turn:
                found = self._call("muster_examine", run.number, *asked)
            yield place, found

    def _prefilled(
        self, samples: Sequence[tuple[Tokens, Tokens]], tick: Callable[[], None]
    ) -> Iterator[tuple[_Run, int]]:
        """Yield the run and every sample's place in it, while the sample's rows are kept."""
        asked = [((*prompt, *completion[:-1]), _prefilled()) for prompt, completion in samples]
        # A prefill goes first: its caller needs the result to finish other work.
        run = _Run(next(self._numbers), due=0)

        def begin() -> None:
            starts = [len(prompt) - 1 for prompt, _ in samples]
            ends = [start + len(s[1]) for start, s in zip(starts, samples, strict=True)]
            spans = zip(run.names, zip(starts, ends, strict=True), strict=True)
            self._call("muster_prefill", run.number, dict(spans))

        with self._weights.used(), self._running(run, asked, begin):
            for ended in self._steps(run, tick):
                for place, _ in ended:
                    yield run, place
                    with self._turn:
                        self._call("muster_drop", run.number, run.names[place])

    @contextmanager
    def _running(
        self, run: _Run, asked: Sequence[tuple[Tokens, Any]], begin: Callable[[], None]
    ) -> Iterator[None]:
        """Give vLLM the requests of a run; at the end, abort those that have not ended."""
        try:
            with self._turn:
                for place, (prompt, parameters) in enumerate(asked):
                    name, given = f"{run.number}.{place}", {"prompt_token_ids": list(prompt)}
                    run.names.append(
                        self._engine.add_request(name, given, parameters, priority=run.due)
                    )
                    run.places[name] = place
                begin()
            yield
        finally:
            with self._turn:
                if run.places:
                    left = [run.names[place] for place in run.places.values()]
                    self._engine.abort_request(left, internal=True)
                for name in run.places:
                    self._ended.pop(name, None)
                self._call("muster_rest", run.number)

    def _steps(self, run: _Run, tick: Callable[[], None]) -> Iterator[list[tuple[int, list[int]]]]:
        """Yield place and tokens of the run's requests that ended, step by step. A step that any
        run takes serves all runs.
        """
        while run.places:
            with self._turn:
                # Others may have taken the last step that this run needed.
                if not self._ended.keys() & run.places.keys():
                    for output in self._engine.step():
                        if output.finished:
                            self._ended[output.request_id] = list(output.outputs[0].token_ids)
                names = [name for name in run.places if name in self._ended]
                ended = [(run.places.pop(name), self._ended.pop(name)) for name in names]
            tick()
            if ended:
                yield ended

    def _running_tokens(self, run: _Run) -> int:
        states = self._engine.output_processor.request_states
        found = [states.get(run.names[place]) for place in run.places.values()]
        return sum(state.detokenizer.num_output_tokens() for state in found if state)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        found = self._engine.collective_rpc(method, args=args, kwargs=kwargs)[0]
        if isinstance(found, Unprovable):
            raise ProofError(found.message)
        return found

    def _find_shape(self, folder: Path) -> PolicyShape:
        return PolicyShape(
            hidden_size=self._config.get_text_config().hidden_size,
            vocab_size=self._llm.model_config.get_vocab_size(),
            eos_token_ids=declared_ends(folder, self._config, self._tokenizer),
            context=_context(self._config) or self._llm.model_config.max_model_len,
        )


# ---------------------------------------------------------------------------------------- opening


def _open(folder: Path, config: Any, options: Options) -> Any:
    from vllm import LLM

    from muster.inference.vllm.noise import SeededGumbel

    on_cpu = options.device == "cpu"
    cache_bytes = options.cache_bytes or (_cache_bytes(config, options) if on_cpu else None)
    try:
        return LLM(
            str(folder),
            skip_tokenizer_init=True,
            load_format="safetensors",
            trust_remote_code=False,
            generation_config="vllm",
            dtype=options.dtype,
            seed=0,
            enforce_eager=on_cpu,
            max_model_len=_length(config, options),
            max_num_seqs=options.max_rows,
            max_num_batched_tokens=max(options.batch_tokens, options.max_rows),
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            scheduling_policy="priority",
            # A token must be chosen, and its row captured, before the next step is scheduled.
            async_scheduling=False,
            kv_cache_memory_bytes=cache_bytes,
            tensor_parallel_size=options.tensor_parallel,
            **({} if on_cpu else {"gpu_memory_utilization": _gpu_share(options)}),
            block_size=_CPU_BLOCK_TOKENS if on_cpu else None,
            disable_log_stats=True,
            logits_processors=[SeededGumbel],
            worker_extension_cls="muster.inference.vllm.capture.HiddenStates",
        )
    except (ValueError, KeyError, RuntimeError, AssertionError, OSError, SafetensorError) as error:
        raise EngineError(
            f"policy folder {folder} does not load in vLLM: {error}",
            hint="it needs config.json, *.safetensors and the tokenizer's files; --engine "
            "transformers runs more architectures",
        ) from error


def _require_runs_here(config: Any, options: Options) -> None:
    """Raise EngineError for a model that other engines refuse, and for limits that vLLM would
    report only in the middle of a batch.
    """
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    if current_platform.is_cpu() != (options.device == "cpu"):
        built, device, other = (
            ("the CPU", "cpu", f"for a GPU {install_hint('vllm')}")
            if current_platform.is_cpu()
            else ("GPUs", "cuda", "for the CPU `make vllm`")
        )
        raise EngineError(
            f"this vLLM is built for {built}, not for {options.device!r}",
            hint=f"give --device {device}; another vLLM: {other}",
        )
    architectures = list(getattr(config, "architectures", None) or ())
    if not set(architectures) & set(ModelRegistry.get_supported_archs()):
        raise EngineError(
            f"vLLM knows no architecture {', '.join(architectures) or '(none named)'}",
            hint="--engine transformers runs any Hugging Face causal language model",
        )
    require_fixed_positions(config)
    if options.device == "cpu":
        _require_head_size(_head_size(config.get_text_config()))


def _require_head_size(size: int) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise EngineError(
            f"vLLM on a CPU cannot compute attention heads of {size}, only of "
            f"{', '.join(map(str, sizes))}",
            hint="--engine transformers can",
        )


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def _context(config: Any) -> int | None:
    context: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return context


def _length(config: Any, options: Options) -> int | None:
    """Return the tokens of the longest sample; the cache must hold one such sample."""
    lengths = [each for each in (_context(config), options.context) if each]
    return min(lengths, default=None)


def _gpu_share(options: Options) -> float:
    """Return the share of a GPU's whole memory that vLLM may use: its share of the free memory."""
    import torch

    share = options.memory_share or GPU_MEMORY_SHARE
    free = [torch.cuda.mem_get_info(number) for number in range(options.tensor_parallel)]
    return share * min(left / total for left, total in free)


def _cache_bytes(config: Any, options: Options) -> int:
    """Return the bytes for keys and values: of all samples at full length, within a bound, and of
    one sample at least.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = 2 if options.dtype == "bfloat16" else 4
    block: int = 2 * text.num_hidden_layers * heads * _head_size(text) * width * _CPU_BLOCK_TOKENS
    per_sample: int = -(-(_length(config, options) or 1) // _CPU_BLOCK_TOKENS) * block
    most = CPU_CACHE_BYTES
    if options.memory_share:
        most = int(options.memory_share * psutil.virtual_memory().available)
    # vLLM keeps a block for itself.
    return max(min(options.max_rows * per_sample, most), per_sample) + block


def _shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the number format and shape of every weight in a folder; raises EngineError."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a mapping, unlike what ruff assumes
                    view = file.get_slice(name)
                    found[name] = (view.get_dtype(), tuple(view.get_shape()))
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise EngineError(f"weights in {folder} do not load: {error}") from error
    if not found:
        raise EngineError(f"policy folder {folder} does not load: no *.safetensors in it")
    return found


# --------------------------------------------------------------------------------------- sampling


def _sampled(request: Request, shape: PolicyShape) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from muster.inference.vllm.noise import ARGUMENT

    return SamplingParams(
        temperature=0.0,
        max_tokens=request.max_new_tokens,
        stop_token_ids=sorted(shape.eos_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={ARGUMENT: [request.seed, request.temperature, request.position]},
    )


def _prefilled() -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # Positions found in the cache would not be computed, and would have no rows.
        skip_reading_prefix_cache=True,
    )
