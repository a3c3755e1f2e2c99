"""Settings of the worker and validator processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, RunId, to_address
from muster.settings import DEFAULT_RPC, DEPLOYMENTS, Confirmations, Settings, urls_of


def _urls(value: Any) -> Any:
    # The environment has no lists.
    return tuple(urls_of(value)) if isinstance(value, str) else value


Urls = Annotated[tuple[str, ...], BeforeValidator(_urls)]
"""URLs; separated by blanks or commas in the environment."""


def devices_of(text: str) -> tuple[str, ...]:
    """Return the devices that are named between commas; a number is that of a GPU."""
    names = (each.strip() for each in text.split(",") if each.strip())
    return tuple(f"cuda:{each}" if each.isdecimal() else each for each in names)


def places_of(devices: Sequence[str], tensor_parallel: int) -> tuple[str, ...]:
    """Return where engines on these devices compute; a model over several GPUs has a plus sign
    between them. Raises ConfigError.
    """
    if len(devices) % tensor_parallel:
        raise ConfigError(f"{len(devices)} devices do not come in groups of {tensor_parallel}")
    gpus = [name for name in devices if name != "cpu"]
    if len(set(gpus)) < len(gpus):
        raise ConfigError(f"a GPU is named twice in {', '.join(devices)}")
    if tensor_parallel == 1:
        return tuple(devices)
    numbers = [name.removeprefix("cuda:") for name in devices]
    starts = range(0, len(numbers), tensor_parallel)
    return tuple(f"cuda:{'+'.join(numbers[i : i + tensor_parallel])}" for i in starts)


def _names(value: Any) -> Any:
    return devices_of(value) if isinstance(value, str) else value


Devices = Annotated[tuple[str, ...], BeforeValidator(_names), Field(max_length=64)]
"""Names of devices; between commas in flags and in the environment."""


class EngineSettings(Settings):
    """The settings of every process that follows the chain and runs a model."""

    rpc: str = DEFAULT_RPC
    """URL of an RPC endpoint of the chain; several, between commas, are compared."""
    deployments: Path = DEPLOYMENTS
    """Folder with the contracts' addresses, one file per chain id."""
    state_dir: Path
    """Where the process keeps what it must not forget; no other process may share it."""
    poll_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Seconds between looks at the chain."""
    confirmations: Confirmations = 0
    """Blocks on top of an event before it is acted on; or `safe` or `finalized`, where the chain
    has such blocks."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What runs the model; vllm has an environment of its own: docs/engines.md."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the model."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads of the model."""
    device: str = "cpu"
    """Where the model computes, as torch names it."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that one model is spread over; vllm only, and measured as a way of its own."""
    context: Annotated[int | None, Field(ge=2, le=1 << 24)] = None
    """Tokens of the longest prompt with its completion that there is room for; None for what the
    run's recipe and problems can come to."""
    memory_share: Annotated[float | None, Field(gt=0, le=1)] = None
    """Part of the device's free memory that weights, keys and values may take; None for 0.9 of a
    GPU's and half of a CPU's."""
    max_rows: Annotated[int, Field(ge=1, le=4096)] = 256
    """Most samples that run at a time."""
    batch_tokens: Annotated[int | None, Field(ge=1, le=1 << 24)] = None
    """Most tokens of one step of the model; None for the engine to choose."""

    @model_validator(mode="after")
    def _only_vllm_spreads_a_model(self) -> Self:
        on_gpus = self.device != "cpu" or all(
            name.startswith("cuda") for name in getattr(self, "devices", ()) or ("cpu",)
        )
        if self.tensor_parallel > 1 and not (self.engine == "vllm" and on_gpus):
            raise ValueError("--tensor-parallel needs --engine vllm and --device cuda")
        return self


class NodeSettings(EngineSettings):
    """What workers and validators share."""

    of_network: ClassVar[frozenset[str]] = Settings.of_network | {"orchestrator", "relay"}

    run: Annotated[RunId, Field(ge=1)]
    """The run to take part in."""
    orchestrator: str
    """URL of the run's orchestrator."""
    relay: Urls = ()
    """URLs of relays; empty for those the orchestrator names."""
    keep_going: bool = False
    """Go on when the run is over: its owner may extend it, or others dispute."""


class JurorSettings(EngineSettings):
    """Settings of `muster juror run`; environment prefix MUSTER_JUROR_."""

    source: Urls = ()
    """URLs that show work, files and documents, beside those that a case names: orchestrators."""
    relay: Urls = ()
    """URLs of relays, beside those that orchestrators name."""


class WorkerSettings(NodeSettings):
    """Settings of `muster worker run`; environment prefix MUSTER_WORKER_."""

    worker: Annotated[Address, BeforeValidator(to_address)]
    """The staking wallet this node works for."""
    devices: Devices = ()
    """Devices side by side, an engine and its process each: 0 or cuda:0 for a GPU, or cpu; empty
    for `device` alone. With `tensor_parallel`, so many after each other have one model."""
    tickets_per_engine: Annotated[int, Field(ge=1, le=8)] = 2
    """Tickets at hand of each engine: samples of one take the rows that another leaves, while
    others are fetched for, graded or uploaded."""
    heartbeat_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Seconds between signs of life."""
    plain: bool = False
    """Log lines on a terminal too, instead of the live view."""

    @property
    def places(self) -> tuple[str, ...]:
        """Where the engines compute."""
        return places_of(self.devices, self.tensor_parallel) or (self.device,)

    @model_validator(mode="after")
    def _devices_come_in_groups(self) -> Self:
        places_of(self.devices, self.tensor_parallel)
        return self


class ValidatorSettings(NodeSettings):
    """Settings of `muster validator run`; environment prefix MUSTER_VALIDATOR_."""

    file_patience_s: Annotated[float, Field(ge=0, le=3600)] = 60.0
    """How long a file that nobody has is asked for before it counts as missing."""
    checks_everything: bool = False
    """Whether it also judges the batches that it is not called for, after the others."""
