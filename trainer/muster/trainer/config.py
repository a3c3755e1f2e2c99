"""Settings of the trainer process, and recipes written as TOML."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from muster.protocol.errors import ConfigError
from muster.protocol.recipe import Recipe
from muster.protocol.sft import SftRecipe
from muster.settings import DEFAULT_RPC, DEPLOYMENTS, Confirmations, Settings

Form = TypeVar("Form", Recipe, SftRecipe)


class TrainerSettings(Settings):
    """How one trainer trains one run; environment prefix MUSTER_TRAINER_."""

    of_network: ClassVar[frozenset[str]] = Settings.of_network | {"orchestrator"}

    run: Annotated[int, Field(ge=1)]
    """The run it trains."""
    keystore: Path
    """Encrypted key of the run's trainer account."""
    password_file: Path | None = None
    """File with the keystore's password; else MUSTER_PASSWORD."""
    orchestrator: str
    """URL of the run's orchestrator: submission files come from it, figures go to it."""
    rpc: str = DEFAULT_RPC
    """JSON-RPC endpoint of the chain."""
    deployments: Path = DEPLOYMENTS
    """Folder of deployment files, one per chain id."""
    documents: Path | None = None
    """Folder with the recipe, named by its hash; without one it is asked of the orchestrator."""
    model: Path | None = None
    """Base model folder; needed only when the store does not hold policy version 0."""
    store: Path = Path("origin")
    """Folder of chunks and manifests that this process serves as the origin."""
    keep: Annotated[int, Field(ge=3)] = 5
    """Newest versions that stay in the store."""
    anchor_every: Annotated[int, Field(ge=0, le=10)] = 8
    """Of so many versions one is broadcast whole, the others as deltas where that is worth it; 0
    for all of them whole. Relays look at 16 versions, so anchors must not lie further apart."""
    state_dir: Path = Path("trainer-state")
    """Checkpoint, policies and metrics; no other process may share it."""
    rank_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Under torchrun: how long one process waits for the others before it gives up."""
    context_ranks: Annotated[int, Field(ge=1)] = 1
    """Under torchrun: how many ranks share rows, each computing a part of every row: for rows
    beyond a rank's memory. Divides the number of ranks; changes memory, not the gradient."""
    sites: Annotated[int, Field(ge=1, le=255)] = 1
    """Trainer sites with which the run begins; 1 for a trainer that is alone."""
    site: Annotated[int, Field(ge=0, le=254)] = 0
    """Which of them this is: 0 publishes, and the others meet there."""
    site_address: Annotated[
        str, Field(pattern=r"^[^:\s]+:\d{1,5}$|^\[[0-9a-fA-F:]+\]:\d{1,5}$")
    ] = "127.0.0.1:8900"
    """HOST:PORT at which site 0 listens for the others; a private network only."""
    site_alive_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """A site that has not shown itself for so long is left out."""
    site_wait_s: Annotated[float, Field(gt=0, le=604800)] = 3600.0
    """How long sites wait for one another's steps and messages."""
    keep_checkpoints: Annotated[int, Field(ge=2, le=1000)] = 2
    """Newest checkpoints that stay in the state folder; the one before stands in for a damaged
    one."""
    eval_set: Path | None = None
    """Task set of held-out problems; evaluated before the first and after the last step."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Evaluate every so many steps as well; 0 for not."""
    eval_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    """Samples per held-out problem; pass@k is estimated for k up to it."""
    steps: Annotated[int, Field(ge=0)] = 0
    """Stop after so many training steps; 0 for as many as the recipe says."""
    host: str = "127.0.0.1"
    """Address the origin listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8800
    """Port the origin listens on; 0 for any free one."""
    ready_file: Path | None = None
    """File that receives the origin's URL once it listens."""
    hand_over_s: Annotated[float, Field(ge=0, le=604800)] = 600.0
    """How long the origin stays after the last step until relays hold the last version."""
    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint."""
    metrics_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """Port of the Prometheus endpoint; 0 for any free one, none for no endpoint."""
    wandb_project: str = ""
    """Weights & Biases project that figures are logged to; empty for none."""
    poll_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Seconds between looks at the chain."""
    confirmations: Confirmations = 0
    """Blocks on top of an outcome before it is trained on; or `safe` or `finalized`, where the
    chain has such blocks. What a deeper reorganisation takes back after that stops the trainer."""
    publish_dtype: Literal["base", "float32", "bfloat16"] = "base"
    """Number format of published weights; `base` for the one that each weight has in the base
    model. An adapter's is float32 then."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward passes and of evaluations; weights, gradients and
    optimiser stay in float32."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens that go through the model together; changes memory and speed, not the gradient.
    Without it, as many as fit, 16,384 at most."""
    recompute: Literal["none", "selective", "full"] | None = None
    """What the backward pass computes again instead of keeping it: nothing, the inside of each
    block's feed-forward part, or whole blocks. Without it, the least that fits."""
    optimizer_state: Literal["float32", "bfloat16"] = "float32"
    """Number format of the optimiser's two moments. bfloat16 takes four bytes a parameter less; it
    is rounded at random, and resumes to the same bits."""
    offload: bool = False
    """Whether the moments are in a file of the state folder instead of the memory, for one process
    on a CPU: eight bytes a parameter less, or four; each optimiser step reads and writes them."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory that a process may take, in 10^9 bytes; without it, what is there."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak of a process's device in 10^12 operations per second, by which `mfu` is measured;
    without it, a product of matrices is timed at the start."""
    alarm_window: Annotated[int, Field(ge=0, le=1000)] = 8
    """Training steps whose median is the level that alarms judge; 0 for no alarms."""
    alarm_grad_growth: Annotated[float, Field(gt=1)] = 1.5
    """Sign of a collapse, with the next: the gradient norm is so many times its lowest level."""
    alarm_entropy_rise: Annotated[float, Field(ge=0)] = 0.15
    """The entropy is above its lowest level by this share of its first."""
    alarm_reward_fall: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Collapse: the reward is below its highest level by more than this share; 1 for never."""
    alarm_patience: Annotated[int, Field(ge=1)] = 3
    """Alarming steps in a row after which something is done."""
    on_collapse: Literal["log", "stop", "rollback"] = "log"
    """What is done then: nothing more, end before the step is taken, or go on from the policy and
    optimiser of one to two windows earlier, as a new version."""
    rollback_slowdown: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor on the learning rate at each rollback."""
    max_rollbacks: Annotated[int, Field(ge=0)] = 3
    """Collapses after so many rollbacks end the run."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads of the model."""
    device: str = "cpu"
    """Where the model computes, as torch names it."""

    @property
    def meeting_place(self) -> tuple[str, int]:
        """Host and port of `site_address`."""
        host, _, port = self.site_address.rpartition(":")
        return host.strip("[]"), int(port)

    @model_validator(mode="after")
    def _sites_can_meet(self) -> Self:
        if self.site >= self.sites:
            raise ValueError(f"site {self.site} is none of {self.sites}: they count from 0")
        return self

    @model_validator(mode="after")
    def _acts_on_alarms_only(self) -> Self:
        if self.on_collapse != "log" and not self.alarm_window:
            raise ValueError(f"on_collapse {self.on_collapse!r} needs an alarm_window above 0")
        return self


def load_recipe(path: Path, *, steps: int | None = None) -> Recipe:
    """Return the recipe of a TOML file, with another number of training steps if given.

    Raises ConfigError naming the field when something is missing, unknown or out of range.
    """
    value = _read_toml(path)
    if steps is not None and isinstance(value.get("training"), dict):
        value["training"]["steps"] = steps
    return _document(Recipe, value, path)


def load_sft_recipe(path: Path) -> SftRecipe:
    """Return the SFT recipe of a TOML file; raises ConfigError as `load_recipe` does."""
    return _document(SftRecipe, _read_toml(path), path)


def load_either_recipe(path: Path) -> Recipe | SftRecipe:
    """Return the recipe of a run or of a fine-tuning; raises ConfigError as `load_recipe` does."""
    value = _read_toml(path)
    if "rows" in value:
        return _document(SftRecipe, value, path)
    return _document(Recipe, value, path)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _document(kind: type[Form], value: dict[str, Any], path: Path) -> Form:
    try:
        return kind.model_validate_json(json.dumps(value))
    except (ValidationError, TypeError) as error:
        raise ConfigError(f"{path}: {_problem(error)}") from error


def _problem(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
