"""RUN.toml: the settings of `muster run create`; flags and environment override it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from muster.client.preflight import require_covered, require_ordered_slashes
from muster.client.quantities import parse_tokens
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import Address, to_address
from muster.settings import DEFAULT_RPC, DEPLOYMENTS, Listed, Settings, load_settings
from muster.settings.flags import find_preset, preset_names
from muster.trainer.config import load_recipe
from muster.trainer.create import RunPlan, read_calibration

if TYPE_CHECKING:
    from muster.wallet import Wallet

VARIABLES = "MUSTER_CREATE_"
"""Prefix of the environment variables of these settings."""


def _amount(value: Any) -> Any:
    """Return the wei of text such as "0.5" or "5 tokens"; a number, as files have it, is wei."""
    return parse_tokens(value) if isinstance(value, str) else value


def _amount_or_none(value: Any) -> Any:
    return 0 if value == "0" else _amount(value)


Ppm = Annotated[int, Field(ge=0, le=10**6)]


class RunFile(Settings):
    """Settings of a new run. Paths are relative to the working directory."""

    keystore: Path
    """Keystore of the run's owner, who pays and may end the run."""
    password_file: Path | None = None
    """Password of that keystore; else MUSTER_PASSWORD, else a prompt."""
    trainer: str | None = None
    """Account that publishes policies; by default that of `trainer_keystore`."""
    trainer_keystore: Path | None = None
    """Keystore that publishes version 0 at once; by default the owner's, if the owner is the
    trainer."""
    trainer_password_file: Path | None = None
    """Password of that keystore; by default the owner's."""
    orchestrator: str
    """Account that signs tickets and commits batches."""
    validators: Annotated[tuple[str, ...], Listed, Field(min_length=1, max_length=88)]
    """Accounts that sign outcomes; each must hold the stake that the network requires."""
    quorum: Annotated[int, Field(ge=1)]
    """How many validators must agree."""
    model: Path
    """Base model folder: config.json, *.safetensors and tokenizer.json."""
    recipe: str
    """Training recipe: a TOML file, or the name of a preset."""
    steps: Annotated[int, Field(ge=0)] | None = None
    """Training steps; by default the recipe's."""
    task_set: Path
    """The problems."""
    calibration: Path
    """The validation limits, measured by `muster calibrate` with this model and recipe."""
    engines: Annotated[tuple[str, ...], Listed] = ()
    """Engines and number formats that the calibration must cover, such as "vllm:bfloat16"."""
    price: Annotated[int, BeforeValidator(_amount), Field(ge=1)]
    """Pay per unit: text in tokens, such as "0.001"; a number without quotes is token wei."""
    fraud_ppm: Ppm = 100_000
    """Millionths of stake slashed for a first statistical fraud; doubled each time."""
    exact_fraud_ppm: Ppm = 500_000
    """Millionths of stake slashed for an exact fraud, which also bans."""
    fund: Annotated[int, BeforeValidator(_amount_or_none), Field(ge=0)] = 0
    """Reward paid into the run at once: text in tokens, such as "1000"; a number without quotes is
    token wei."""
    store: Path
    """The trainer's chunk store, which receives version 0."""
    documents: Path
    """Receives recipe, calibration and task set, each named by its hash."""
    sample: Annotated[int, Field(ge=0, le=65_536)] = 16
    """Problems on which the base model is tried, four samples each; 0 skips the trial."""
    device: str = "cpu"
    """Device of the base model, as torch names it."""
    rpc: str = DEFAULT_RPC
    """Endpoint of the chain; several, separated by commas, are compared."""
    deployments: Path = DEPLOYMENTS
    """Folder with the contracts' addresses."""

    @field_validator("recipe")
    @classmethod
    def _is_a_recipe(cls, value: str) -> str:
        if not Path(value).is_file() and find_preset(value) is None:
            raise ValueError(
                f"{value!r} is neither a file nor a preset ({', '.join(preset_names())})"
            )
        return value

    def plan(
        self, trainer: Address, *, admit_anyway: bool = False, accept_unsafe_economics: bool = False
    ) -> RunPlan:
        """Return the plan of the run; `trainer` is the account of the given trainer key.

        Raises ConfigError that names an invalid value.
        """
        if self.quorum > len(self.validators):
            raise ConfigError(
                f"a quorum of {self.quorum} of {len(self.validators)} validators is impossible",
                hint="lower the quorum, or name more validators",
            )
        require_ordered_slashes(self.fraud_ppm, self.exact_fraud_ppm)
        for engine in self.engines:
            require_covered(read_calibration(self.calibration), engine)
        named = _account("trainer", self.trainer) if self.trainer else trainer
        if self.trainer_keystore and named != trainer:
            raise ConfigError(
                f"trainer_keystore holds the key of {trainer}, but trainer is {named}",
                hint="leave out trainer, or give that account's keystore",
            )
        recipe = self.recipe if Path(self.recipe).is_file() else find_preset(self.recipe)
        return RunPlan(
            model=self.model,
            recipe=load_recipe(Path(str(recipe)), steps=self.steps),
            task_set=self.task_set,
            calibration=self.calibration,
            trainer=named,
            orchestrator=_account("orchestrator", self.orchestrator),
            validators=tuple(_account("validators", each) for each in self.validators),
            quorum=self.quorum,
            price_wei=self.price,
            fraud_ppm=self.fraud_ppm,
            exact_fraud_ppm=self.exact_fraud_ppm,
            fund_wei=self.fund,
            store=self.store,
            documents=self.documents,
            admits_anyway=admit_anyway,
            accepts_unsafe_economics=accept_unsafe_economics,
        )


def read_run(file: Path | None, flags: dict[str, Any]) -> RunFile:
    """Return the settings of a new run; raises ConfigError that names an invalid one."""
    return load_settings(RunFile, file=file, flags=flags, env_prefix=VARIABLES)


def wallets_of(asked: RunFile) -> tuple[Wallet, Wallet]:
    """Return the owner's account and the one that may be the trainer's; raises WalletError."""
    from muster.wallet import open_wallet

    owner = open_wallet(asked.keystore, asked.password_file, what=f"owner {asked.keystore}")
    if asked.trainer_keystore is None:
        return owner, owner
    password = asked.trainer_password_file or asked.password_file
    what = f"trainer {asked.trainer_keystore}"
    return owner, open_wallet(asked.trainer_keystore, password, what=what)


def _account(setting: str, text: str) -> Address:
    try:
        return to_address(text)
    except EncodingError as error:
        raise ConfigError(
            f"{setting} {text!r}: {error}", hint="write an account as 0x and 40 hex digits"
        ) from error
