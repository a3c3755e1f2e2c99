"""Settings of worker, validator and juror processes; a relay's are in `muster.client.relay`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, RunId, to_address
from muster.settings import DEFAULT_RPC, DEPLOYMENTS, Confirmations, Settings, Urls


def devices_of(text: str) -> tuple[str, ...]:
    """Return the devices in a comma-separated text; a number means a GPU."""
    names = (each.strip() for each in text.split(",") if each.strip())
    return tuple(f"cuda:{each}" if each.isdecimal() else each for each in names)


def places_of(devices: Sequence[str], tensor_parallel: int) -> tuple[str, ...]:
    """Return the device of each engine; GPUs that share one model are joined by a plus sign. Raises
    ConfigError.
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
"""Names of devices, separated by commas in flags and in the environment."""


class EngineSettings(Settings):
    """The settings of every process that follows the chain and runs a model."""

    rpc: str = DEFAULT_RPC
    """URL of an RPC endpoint of the chain; several, separated by commas, are compared."""
    deployments: Path = DEPLOYMENTS
    """Folder with the contracts' addresses, one file per chain id."""
    state_dir: Path
    """Folder of the process's durable state; no other process may share it."""
    poll_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Seconds between two polls of the chain."""
    confirmations: Confirmations = 0
    """Blocks on top of an event before it is acted on; or `safe` or `finalized`, where the chain
    has such blocks."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Engine that runs the model; vllm needs its own environment: docs/engines.md."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the model."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads of the model."""
    device: str = "cpu"
    """Device of the model, as torch names it."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that share one model; vllm only. A calibration must cover each number separately."""
    context: Annotated[int | None, Field(ge=2, le=1 << 24)] = None
    """Most tokens of a prompt with its completion; None for the longest that the run's recipe and
    problems allow."""
    memory_share: Annotated[float | None, Field(gt=0, le=1)] = None
    """Share of the device's free memory for weights, keys and values; None for 0.9 on a GPU and
    half on a CPU."""
    max_rows: Annotated[int, Field(ge=1, le=4096)] = 256
    """Most samples in one batch."""
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
    """Settings shared by workers and validators."""

    of_network: ClassVar[frozenset[str]] = Settings.of_network | {"orchestrator", "relay"}

    run: Annotated[RunId, Field(ge=1)]
    """The run to take part in."""
    orchestrator: str
    """URL of the run's orchestrator."""
    relay: Urls = ()
    """URLs of relays; empty for those that the orchestrator names."""
    keep_going: bool = False
    """Continue when the run is over: its owner may extend it, or others may open disputes."""


class JurorSettings(EngineSettings):
    """Settings of `muster juror run`; environment prefix MUSTER_JUROR_."""

    source: Urls = ()
    """URLs of orchestrators with work, files and documents, besides those that a case names."""
    relay: Urls = ()
    """URLs of relays, besides those that orchestrators name."""


class WorkerSettings(NodeSettings):
    """Settings of `muster worker run`; environment prefix MUSTER_WORKER_."""

    worker: Annotated[Address, BeforeValidator(to_address)]
    """The staking wallet this node works for."""
    devices: Devices = ()
    """Devices with one engine process each: 0 or cuda:0 for a GPU, or cpu; empty for `device` only.
    With `tensor_parallel` N, every N devices in a row share one model."""
    tickets_per_engine: Annotated[int, Field(ge=1, le=8)] = 2
    """Tickets that each engine works on at a time: samples of one fill the batch rows that another
    frees, while others are fetched, graded or uploaded."""
    heartbeat_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Seconds between heartbeats."""
    plain: bool = False
    """Print log lines instead of the live view, also on a terminal."""

    @property
    def places(self) -> tuple[str, ...]:
        """The device of each engine."""
        return places_of(self.devices, self.tensor_parallel) or (self.device,)

    @model_validator(mode="after")
    def _devices_come_in_groups(self) -> Self:
        places_of(self.devices, self.tensor_parallel)
        return self


class ValidatorSettings(NodeSettings):
    """Settings of `muster validator run`; environment prefix MUSTER_VALIDATOR_."""

    file_patience_s: Annotated[float, Field(ge=0, le=3600)] = 60.0
    """Seconds for which a file that the orchestrator and all relays lack is requested before it
    counts as unavailable; half of the outcome deadline while a relay is silent. An orchestrator
    that does not answer is awaited for ever."""
    refused_bytes: Annotated[int, Field(ge=0)] = 16 << 30
    """Bytes of evidence that it keeps about files that it neither accepts nor calls fraud; the
    oldest make way."""
    checks_everything: bool = False
    """Whether it also judges batches that it is not called for, after the others."""
