"""Creating a run: documents, base model and configuration on chain, and policy version 0.

The order is given by the contracts: the run pins the hashes of its documents and base model, its id
goes into the manifest of version 0, whose root the trainer then publishes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.chain import Chain, RunConfig, RunTerms
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, StorageError, TaskError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.recipe import Recipe
from muster.shardcast import ChunkStore, state_hash
from muster.tasks import TaskSet, identities
from muster.tasks.admission import Trial, admit
from muster.toploc import Calibration
from muster.trainer.chain_ports import ChainAnchor
from muster.trainer.economics import cheats_of, read_fixed, refuse_unsafe, terms_of
from muster.trainer.policies import BASE, policy_files
from muster.trainer.publish import Publisher
from muster.trainer.suitability import require_files_fit

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
TRIED = 64
"""Problems that are graded before a run relies on a task set; `muster tasks check` tries more."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a new run is made of."""

    model: Path
    """Base model folder."""
    recipe: Recipe
    """How it is trained."""
    task_set: Path
    """The problems."""
    calibration: Path
    """The validation limits."""
    trainer: Address
    """Publishes policies."""
    orchestrator: Address
    """Signs tickets, commits batches."""
    validators: Sequence[Address]
    """Are invited to sign outcomes."""
    quorum: int
    """How many of them must agree."""
    price_wei: int
    """Token wei per unit."""
    fraud_ppm: int
    """Millionths of the stake slashed for a first statistical fraud."""
    exact_fraud_ppm: int
    """Millionths of the stake slashed for an exact fraud."""
    fund_wei: int
    """Reward paid in at once; 0 for nothing."""
    store: Path
    """The trainer's chunk store, which receives version 0."""
    documents: Path
    """Receives recipe, calibration and task set, each named by its hash."""
    admits_anyway: bool = False
    """Whether a task set that is not admitted is taken all the same."""
    accepts_unsafe_economics: bool = False
    """Whether terms under which cheating pays are taken all the same."""


Agree = Callable[[Chain, RunConfig], Awaitable[None]]
"""Is shown what is about to be created, after all checks, and raises to leave it."""


@dataclass(frozen=True, slots=True)
class Documents:
    """What a run pins beside its model."""

    recipe: bytes
    """The recipe, canonical, with its verifiers."""
    calibration: bytes
    """The calibration, canonical."""
    task_set: TaskSet
    """The problems."""

    def hashes(self) -> dict[str, Hash32]:
        """Return their hashes by name."""
        return {
            "recipe": keccak(self.recipe),
            "calibration": keccak(self.calibration),
            "task_set": self.task_set.hash(),
        }

    def write(self, folder: Path) -> None:
        """Write each under its hash."""
        folder.mkdir(parents=True, exist_ok=True)
        for data in (self.recipe, self.calibration):
            (folder / keccak(data).hex()).write_bytes(data)
        self.task_set.write(folder / self.task_set.hash().hex())


async def create_run(
    plan: RunPlan,
    *,
    rpc: str,
    deployments: Path,
    owner: bytes,
    trainer: bytes | None,
    agree: Agree | None = None,
) -> dict[str, Any]:
    """Create and fund the run; returns its id and the hashes it pins.

    Version 0 is published when the trainer's key is given; otherwise the trainer does it when it
    starts. Raises ConfigError when the parts do not fit, the owner lacks tokens or cheating
    would pay: before anything is written or sent.
    """
    files = model_files(plan.model)
    if trainer is not None and address_of(trainer) != plan.trainer:
        raise ConfigError(f"the trainer's key is {address_of(trainer)}, not {plan.trainer}")
    documents = check_documents(plan)
    hashes = documents.hashes()
    config = RunConfig(
        trainer=plan.trainer,
        orchestrator=plan.orchestrator,
        base_model_hash=state_hash(files),
        task_set_hash=hashes["task_set"],
        recipe_hash=hashes["recipe"],
        calibration_hash=hashes["calibration"],
        terms=RunTerms(plan.price_wei, plan.fraud_ppm, plan.exact_fraud_ppm, plan.quorum),
        validators=tuple(plan.validators),
    )
    async with await Chain.connect(rpc, deployments, key=owner) as chain:
        await _require_safe_economics(plan, config.terms, chain)
        await _require_tokens(plan, chain, address_of(owner))
        if agree is not None:
            await agree(chain, config)
        documents.write(plan.documents)
        run_id, _ = await chain.runs.create_run(config)
        logger.info("run created", extra={"run": run_id})
        if plan.fund_wei:
            await chain.token.approve(chain.deployment.contracts["RewardEscrow"], plan.fund_wei)
            await chain.escrow.fund(run_id, plan.fund_wei)
    created: dict[str, Any] = {"run_id": int(run_id)}
    created |= {f"{name}_hash": hex0x(value) for name, value in hashes.items()}
    created["base_model_hash"] = hex0x(config.base_model_hash)
    if trainer is not None:
        root = await _publish_base(plan, run_id, rpc, deployments, trainer)
        created["policy_root"] = hex0x(root)
    return created


async def _require_safe_economics(plan: RunPlan, run: RunTerms, chain: Chain) -> None:
    """Raise ConfigError when cheating pays under the run's terms, unless the plan accepts it."""
    calibration = Calibration.from_bytes(_read(plan.calibration))
    terms = terms_of(plan.recipe, calibration, run, await read_fixed(chain))
    try:
        refuse_unsafe(terms, cheats_of(calibration))
    except ConfigError as refused:
        if not plan.accepts_unsafe_economics:
            raise
        logger.warning("economics accepted against reason", extra={"reason": str(refused)})


async def _require_tokens(plan: RunPlan, chain: Chain, owner: Address) -> None:
    """Raise ConfigError when the owner cannot pay in what the plan says."""
    held = await chain.token.balance_of(owner)
    if held < plan.fund_wei:
        raise ConfigError(
            f"{owner} holds {held} token wei, the run is to be funded with {plan.fund_wei}",
            hint="lower --fund; `muster run fund` adds more later",
        )


def model_files(folder: Path) -> dict[str, Path]:
    """Return the files of a base model; raises StorageError for what no worker could load."""
    files = policy_files(folder)
    if TOKENIZER_FILE not in files:
        raise StorageError(
            f"{folder} has no {TOKENIZER_FILE}: no worker could read a prompt",
            hint="put the model's there; transformers writes it with save_pretrained",
        )
    return files


def check_documents(plan: RunPlan) -> Documents:
    """Return what the run pins beside its model.

    The recipe is pinned together with the verifiers that graded the task set here. Raises
    ConfigError or TaskError when they are no good or do not fit together.
    """
    task_set = TaskSet.open(plan.task_set)
    task_types = _admitted_task_types(plan, task_set)
    recipe, measured = pinned_recipe(plan.recipe, task_types), _read(plan.calibration)
    if plan.recipe.sampling.problems_per_submission > len(task_set):
        raise ConfigError(
            f"{plan.task_set} has {len(task_set)} problems, a submission needs "
            f"{plan.recipe.sampling.problems_per_submission} different ones",
            hint="lower sampling.problems_per_submission, or add problems",
        )
    calibration = Calibration.from_bytes(measured)
    _check_calibration(calibration, plan)
    require_files_fit(plan.recipe, calibration.model.hidden_size)
    return Documents(recipe.to_bytes(), measured, task_set)


def _admitted_task_types(plan: RunPlan, task_set: TaskSet) -> list[str]:
    """Return the task types of a set; raises TaskError when it should not be relied on."""
    trial = Trial(sample=TRIED, hacked=1, allows_judge=plan.recipe.allows_judge)
    found = admit(task_set, trial)
    if not found.is_admitted:
        if not plan.admits_anyway:
            raise TaskError(
                f"{plan.task_set} is refused: {found.summary()}",
                hint="`muster tasks check` says more; --admit-anyway takes it as it is",
            )
        logger.warning("task set admitted against reason", extra={"reason": found.summary()})
    return sorted(found.task_types)


def pinned_recipe(recipe: Recipe, task_types: Iterable[str]) -> Recipe:
    """Return the recipe as a run over these task types pins it: with who grades them here."""
    return recipe.model_copy(update={"verifiers": identities(task_types)})


def _check_calibration(calibration: Calibration, plan: RunPlan) -> None:
    recipe = plan.recipe
    measured = (calibration.proof, calibration.temperature)
    if measured != (recipe.proof, recipe.sampling.temperature):
        raise ConfigError(
            f"{plan.calibration} was measured with other proofs or at another temperature",
            hint="measure again: muster calibrate --recipe with this recipe",
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


async def _publish_base(
    plan: RunPlan, run_id: RunId, rpc: str, deployments: Path, key: bytes
) -> Hash32:
    async with await Chain.connect(rpc, deployments, key=key) as chain:
        publisher = Publisher(
            ChunkStore(plan.store),
            ChainAnchor(chain, run_id),
            run_id=run_id,
            domain=chain.domain("RunRegistry"),
            key=key,
        )
        return await publisher.publish(BASE, plan.model, 0, 0)
