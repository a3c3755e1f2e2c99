"""Settings of the trainer process, and recipes written as TOML."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from muster.protocol.recipe import Recipe
from muster.protocol.sft import SftRecipe
from muster.settings import (
    DEFAULT_RPC,
    DEPLOYMENTS,
    Confirmations,
    Settings,
    parse_document,
    read_toml,
)


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
    """Folder with the recipe, named by its hash; without it the recipe is downloaded from the
    orchestrator."""
    model: Path | None = None
    """Base model folder; needed only when the store does not hold policy version 0."""
    store: Path = Path("origin")
    """Folder of chunks and manifests that this process serves as the origin."""
    keep: Annotated[int, Field(ge=3)] = 5
    """How many of the newest versions stay in the store."""
    hold_s: Annotated[float, Field(ge=0)] | None = None
    """Seconds for which older versions stay, too; None for as long as outcomes of their work can be
    disputed. They give way where the disk is three quarters full."""
    anchor_every: Annotated[int, Field(ge=0, le=10)] = 8
    """Every N-th version is broadcast whole, the others as deltas where that is smaller; 0 for all
    of them whole. A client that holds no version fetches at most so many."""
    state_dir: Path = Path("trainer-state")
    """Checkpoint, policies and metrics; no other process may share it."""
    rank_timeout_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Under torchrun: how long one process waits for the others before it gives up."""
    context_ranks: Annotated[int, Field(ge=1)] = 1
    """Under torchrun: how many ranks share each row, when a row exceeds the memory of one rank.
    Must divide the number of ranks; changes memory, not the gradient."""
    sites: Annotated[int, Field(ge=1, le=255)] = 1
    """Trainer sites at the start of the run; 1 for a single trainer."""
    site: Annotated[int, Field(ge=0, le=254)] = 0
    """Number of this site. Site 0 publishes, and the others connect to it."""
    site_address: Annotated[
        str, Field(pattern=r"^[^:\s]+:\d{1,5}$|^\[[0-9a-fA-F:]+\]:\d{1,5}$")
    ] = "127.0.0.1:8900"
    """HOST:PORT at which site 0 listens for the others, and at no other address; on a private
    network only. With a name as HOST it listens at all addresses of its machine."""
    site_alive_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds without a sign of life after which a site is left out."""
    site_wait_s: Annotated[float, Field(gt=0, le=604800)] = 3600.0
    """Deadline in seconds at site 0 for another site's step, and at each site for a message. The
    others wait for site 0 as long as it gives signs of life."""
    keep_checkpoints: Annotated[int, Field(ge=2, le=1000)] = 2
    """How many checkpoints stay in the state folder; if the newest is damaged, the one before is
    used."""
    file_patience_s: Annotated[float, Field(ge=0, le=604800)] = 600.0
    """Seconds for which an accepted file that neither the orchestrator nor its relays have is asked
    for before training goes on without it; at most 30 where a worker committed it directly and one
    that it committed directly was given up before; ten times as long while a relay does not
    answer; with several sites, for ever. An orchestrator that does not answer is awaited for
    ever."""
    eval_set: Path | None = None
    """Task set of held-out problems; evaluated before the first and after the last step."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Also evaluate every N steps; 0 for never."""
    eval_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    """Samples per held-out problem; pass@k is estimated for k up to this number."""
    steps: Annotated[int, Field(ge=0)] = 0
    """Stop after this many training steps; 0 for the number in the recipe."""
    host: str = "127.0.0.1"
    """Address the origin listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8800
    """Port the origin listens on; 0 for any free one."""
    trusted_proxies: str = ""
    """Addresses and networks of reverse proxies before the origin whose X-Forwarded-For counts,
    separated by commas."""
    ready_file: Path | None = None
    """File that receives the origin's URL once it listens."""
    hand_over_s: Annotated[float, Field(ge=0, le=604800)] = 600.0
    """Seconds that the origin stays up at most after the last step, until relays hold the last
    version."""
    metrics_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint."""
    metrics_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """Port of the Prometheus endpoint; 0 for any free one. Without it there is no endpoint."""
    wandb_project: str = ""
    """Weights & Biases project that figures are logged to; empty for none."""
    poll_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Seconds between two polls of the chain."""
    confirmations: Confirmations = 0
    """Blocks on top of an outcome before it is trained on; or `safe` or `finalized`, where the
    chain has such blocks. A deeper reorganisation that removes a trained outcome stops the
    trainer."""
    publish_dtype: Literal["base", "float32", "bfloat16"] = "base"
    """Number format of published weights; `base` keeps each weight's format in the base model, and
    writes an adapter in float32."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of forward and backward passes and of evaluations. Weights, gradients and
    optimiser stay in float32."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of one micro-batch; changes memory and speed, not the gradient. Without it, as many as
    fit, 16,384 at most."""
    recompute: Literal["none", "selective", "full", "host"] | None = None
    """Activations that the backward pass recomputes: none, those inside each block's feed-forward
    part, or those of whole blocks. `host`, on a GPU: of whole blocks, whose inputs wait in the
    host's memory. Without it, the least that fits, and `host` where nothing else does."""
    optimizer_state: Literal["float32", "bfloat16"] = "float32"
    """Number format of the optimiser's two moments. bfloat16 saves four bytes a parameter. It is
    rounded stochastically, with the same bits after a resume."""
    offload: bool = False
    """Whether the moments are in a file of the state folder instead of the memory; for one process
    on a CPU. Saves eight bytes a parameter (four in bfloat16); each optimiser step reads and writes
    the file."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Memory that a process may take, in 10^9 bytes; without it, all that is free."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Peak speed of a process's device in 10^12 operations per second, the reference for `mfu`.
    Without it, matrix products are timed at the start."""
    alarm_window: Annotated[int, Field(ge=0, le=1000)] = 8
    """Alarms compare levels: the median of a figure over this many training steps; 0 for no
    alarms."""
    alarm_grad_growth: Annotated[float, Field(gt=1)] = 1.5
    """A collapse shows when the level of the gradient norm is this many times its lowest, and
    `alarm_entropy_rise` is exceeded too."""
    alarm_entropy_rise: Annotated[float, Field(ge=0)] = 0.15
    """Rise of the entropy above its lowest level, as a share of its first level."""
    alarm_reward_fall: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The reward has collapsed when it is below its highest level by more than this share; 1 for
    never."""
    alarm_patience: Annotated[int, Field(ge=1)] = 3
    """Alarming steps in a row before the trainer acts."""
    on_collapse: Literal["log", "stop", "rollback"] = "log"
    """Reaction to a lasting alarm: only log it, stop before the step is taken, or publish the
    policy of one to two windows earlier as a new version and continue with it and its optimiser.
    Weights that are not finite, and steps in a row without a finite update, stop also a trainer
    that only logs."""
    rollback_slowdown: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor by which each rollback multiplies the learning rate."""
    max_rollbacks: Annotated[int, Field(ge=0)] = 3
    """A collapse after this many rollbacks stops the trainer."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads of the model."""
    device: str = "cpu"
    """Device of the model, as torch names it."""

    @property
    def meeting_place(self) -> tuple[str, int]:
        """The host and port in `site_address`."""
        host, _, port = self.site_address.rpartition(":")
        return host.strip("[]"), int(port)

    @model_validator(mode="after")
    def _sites_can_meet(self) -> Self:
        if self.site >= self.sites:
            raise ValueError(
                f"site {self.site} of {self.sites} does not exist: sites are numbered from 0"
            )
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
    value = read_toml(path)
    if steps is not None and isinstance(value.get("training"), dict):
        value["training"]["steps"] = steps
    return parse_document(Recipe, value, path)


def load_sft_recipe(path: Path) -> SftRecipe:
    """Return the SFT recipe of a TOML file; raises ConfigError as `load_recipe` does."""
    return parse_document(SftRecipe, read_toml(path), path)


def load_either_recipe(path: Path) -> Recipe | SftRecipe:
    """Return the recipe of a run or of a fine-tuning; raises ConfigError as `load_recipe` does."""
    value = read_toml(path)
    if "rows" in value:
        return parse_document(SftRecipe, value, path)
    return parse_document(Recipe, value, path)
