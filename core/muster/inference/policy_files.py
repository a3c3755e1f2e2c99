"""A policy folder, in memory: `config.json`, tokenizer files and `*.safetensors`.

Loads any Hugging Face causal language model, and swaps the weights in place when only they changed
since the last version, which is what every training step does. Never unpickles, never runs code
from the folder, never uses the network.
"""

import hashlib
import inspect
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.utils import logging as transformers_logging

from muster.protocol.errors import DeviceLost, EngineError
from muster.protocol.set_aside import FILE_NAME

# While transformers builds a model it changes defaults of the whole process. A second model that is
# built at the same time would miss tied weights.
_BUILDING = threading.Lock()
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".peft")
_OTHER_READING = re.compile(
    r"adapter_config\.json|adapter_model\.(bin|safetensors)|tekken\.json"
    r"|tokenizer\.model\.v.*|params\.json|consolidated.*|hf_quant_config\.json"
)
"""Files from which peft, mistral-common or vLLM would load another model or tokenizer than programs
without them."""
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OTHER_SETTINGS = frozenset(
    {
        "compression_config",
        "configuration_files",
        "fast_tokenizer_files",
        "fusion_config",
        "quantization_config",
        "transformers_weights",
    }
)
"""Settings that name other files, or arithmetic that depends on the GPU and on packages."""
_KERNELS = re.compile(r"_?(attn|experts)_implementation")
_SURE_KERNELS = ("eager", "sdpa", None)
_LAYERS = re.compile(r"((num_)?(en|de)coder_|decoder_num_hidden_|num_hidden_|num_|n_)?layers?")
"""Names of the settings that say how many layers a model has."""

_FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Types of rotary embeddings whose angles depend on the position alone."""


@dataclass(slots=True)
class LoadedPolicy:
    """A loaded model and what its folder says about it."""

    model: Any
    """The transformers model, in evaluation mode."""
    tokenizer: Any
    """Its tokenizer."""
    eos_token_ids: frozenset[int]
    """Ids that end a completion: the configuration's, the generation settings', the tokenizer's."""
    fingerprint: dict[str, str]
    """SHA-256 of every file but the weights and the list of problems set aside."""


@contextmanager
def as_engine_error(what: str, hint: str | None = None) -> Iterator[None]:
    """Turn any error into an EngineError: a stranger's files may make libraries raise any."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise to_engine_error(what, error, hint) from error


def to_engine_error(what: str, error: BaseException, hint: str | None = None) -> EngineError:
    """Return the error to raise instead of another one; DeviceLost after an error of CUDA."""
    # cuBLAS's errors are no AcceleratorErrors. A lack of memory is neither, and passes.
    is_lost = isinstance(error, torch.AcceleratorError) or str(error).startswith("CUDA error")
    kind = DeviceLost if is_lost else EngineError
    return kind(f"{what}: {error or type(error).__name__}", hint=hint)


def load_folder(folder: Path, *, dtype: torch.dtype, device: str) -> LoadedPolicy:
    """Return the model of a folder; raises EngineError when it is unusable, for example when any
    weight is missing or left over.
    """
    transformers_logging.disable_progress_bar()
    needs = "it needs config.json, *.safetensors and the tokenizer's files"
    require_one_reading(folder)
    with as_engine_error(f"policy folder {folder} does not load", needs):
        with _BUILDING:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        tokenizer = read_tokenizer(folder)
        _require_complete(folder, report)
        require_supported(model)
        model.to(device).eval().requires_grad_(False)
        keep_caps(model)
        eos = eos_token_ids(model.config.get_text_config(), model.generation_config, tokenizer)
        return LoadedPolicy(model, tokenizer, eos, fingerprint(folder))


def read_config(folder: Path) -> Any:
    """Return the configuration of a folder's model; raises whatever transformers raises."""
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder's tokenizer.json; raises EngineError where others could read
    another one from the folder, else whatever transformers raises.
    """
    require_one_reading(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, mistral_format=False
    )
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise EngineError(
            f"the tokenizer of {folder} is a {type(tokenizer).__name__}, which does not read "
            "tokenizer.json",
            hint="save the model with a fast tokenizer of transformers",
        )
    return tokenizer


def require_one_reading(folder: Path) -> None:
    """Raise EngineError unless every program loads the same model and tokenizer from a folder,
    whatever else is installed and was loaded before: else honest work would look forged.
    """
    if not (folder / "tokenizer.json").is_file():
        raise EngineError(
            f"policy folder {folder} does not load: it has no tokenizer.json",
            hint="save the model with a fast tokenizer of transformers",
        )
    others = sorted(p.name for p in folder.iterdir() if _OTHER_READING.fullmatch(p.name))
    if others:
        raise EngineError(
            f"policy folder {folder} holds {', '.join(others[:3])}: with some packages installed, "
            "programs would load another model from it",
            hint="the run's owner must publish it without them; merge an adapter into the weights",
        )
    with as_engine_error(f"policy folder {folder} does not load"):
        tensors = _require_one_model(folder)
        for name in ("config.json", "tokenizer_config.json"):
            _require_one_meaning(folder / name, tensors)


def _require_one_model(folder: Path) -> int | None:
    """Return how many tensors the weights have, None without weights; raises EngineError unless
    transformers and vLLM read just these from the folder, and each of them once.
    """
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    index = folder / _INDEX
    if not files and not index.exists():
        return None
    held: list[tuple[str, str]] = []
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            held += [(tensor, name) for tensor in file.keys()]  # noqa: SIM118
    what = f"policy folder {folder} does not load everywhere alike"
    if index.exists():
        named = json.loads(index.read_bytes())["weight_map"]
        if sorted(named.items()) != sorted(held):
            raise EngineError(
                f"{what}: {_INDEX} names other tensors or files than its *.safetensors hold",
                hint="the run's owner must publish it with the right index, or save it anew",
            )
    if files != [_WEIGHTS] and (_WEIGHTS in files or not index.exists()):
        raise EngineError(
            f"{what}: it holds {', '.join(files[:3])}",
            hint=f"the run's owner must publish {_WEIGHTS} alone, or several files with {_INDEX}",
        )
    return len(held)


def _require_one_meaning(path: Path, tensors: int | None) -> None:
    """Raise EngineError when a file of settings, if it is there, names other files or arithmetic
    that depends on the machine, or more layers than the weights can have.
    """
    if not path.is_file():
        return
    parts = [json.loads(path.read_bytes())]
    while parts:
        part = parts.pop()
        parts += part if isinstance(part, list) else []
        for name, value in part.items() if isinstance(part, dict) else ():
            parts.append(value)
            is_other = name in _OTHER_SETTINGS and value is not None
            if is_other or (_KERNELS.fullmatch(name) and value not in _SURE_KERNELS):
                raise EngineError(
                    f"{path} sets {name}: what programs compute from it would depend on the "
                    "machine and its packages",
                    hint="the run's owner must publish it without this setting; quantised models "
                    "are not supported",
                )
            is_layers = tensors is not None and _LAYERS.fullmatch(name) and isinstance(value, int)
            if is_layers and value > (tensors or 0):
                raise EngineError(f"{path} sets {name} to {value}, its weights have {tensors}")


def fingerprint(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a policy folder except weights, index, adapter and the
    list of problems set aside: if only these differ, the weights are swapped in place.
    """
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.endswith((*_WEIGHT_SUFFIXES, FILE_NAME))
    }


def swap_weights(model: Any, folder: Path) -> bool:
    """Overwrite the model's weights with the folder's; return whether that was possible.

    It is possible when the files name every parameter exactly once (tied ones under either name)
    with its shape; otherwise nothing changes. Raises EngineError when the files cannot be read; the
    model may then hold a mixture.
    """
    require_one_reading(folder)
    parameters: Mapping[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    with as_engine_error(f"weights in {folder} do not load"), ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, framework="pt"))
            for path in sorted(folder.glob("*.safetensors"))
        ]
        located = [(name, file) for file in files for name in file.keys()]  # noqa: SIM118
        shapes = [(name, tuple(file.get_slice(name).get_shape())) for name, file in located]
        if not _covers(parameters, shapes):
            return False
        with torch.no_grad():
            for name, file in located:
                parameters[name].copy_(file.get_tensor(name))
    return True


def _covers(
    parameters: Mapping[str, torch.Tensor], shapes: list[tuple[str, tuple[int, ...]]]
) -> bool:
    if any(n not in parameters or parameters[n].shape != shape for n, shape in shapes):
        return False
    named = [id(parameters[name]) for name, _ in shapes]
    return len(named) == len(set(named)) and set(named) == {id(p) for p in parameters.values()}


def _require_complete(folder: Path, report: Mapping[str, Any]) -> None:
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(problem):
            names = ", ".join(sorted(map(str, report[problem]))[:3])
            raise EngineError(
                f"weights in {folder} have {problem.replace('_', ' ')}: {names}",
                hint="the weights belong to another configuration",
            )


def require_supported(model: Any) -> None:
    """Raise EngineError unless a model's head can compute some positions only, and its positions
    are fixed.
    """
    accepts = inspect.signature(model.forward).parameters
    if model.get_output_embeddings() is None or "logits_to_keep" not in accepts:
        raise EngineError(f"{type(model).__name__} is not a causal language model with a head")
    require_fixed_positions(model.config)


def require_fixed_positions(config: Any) -> None:
    """Raise EngineError for rotary embeddings whose angles depend on the length of the call:
    decoding, examining and training of the same tokens would differ, and honest work look forged.

    `config` is as transformers describes it.
    """
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # Models with several kinds of layers have parameters for each kind.
    kinds = [each for each in found.values() if isinstance(each, dict)] or [found]
    types = {each.get("rope_type") or "default" for each in kinds}
    if unknown := sorted(types - _FIXED_ROPES):
        raise EngineError(
            f"{config.model_type} has rotary embeddings of type {', '.join(unknown)}, whose angles "
            "depend on how many tokens are computed at once",
            hint="use a model whose rope_type in config.json is one of "
            f"{', '.join(sorted(_FIXED_ROPES))}",
        )


def keep_caps(model: Any) -> None:
    """Choose a kernel that caps attention's scores if the model does: transformers' sdpa silently
    ignores the cap.
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")


def declared_ends(folder: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the `eos_token_ids` of a folder without loading its model."""
    try:
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        generation = None
    return eos_token_ids(config.get_text_config(), generation, tokenizer)


def eos_token_ids(config: Any, generation: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a completion, by a text configuration, the generation settings (None
    for none) and a tokenizer.
    """
    found: set[int] = set()
    for value in (
        getattr(config, "eos_token_id", None),
        getattr(generation, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)
