"""Creating a run: documents, base model and configuration on chain, and policy version 0.

The contracts give the order: the run pins the hashes of its documents and base model, its id goes
into the manifest of version 0, and the trainer publishes that manifest's root. Before anything is
sent, the parts are compared with one another. `check_documents` needs the documents only and takes
seconds; `try_model` loads the model and tries it on a sample of the problems.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.chain import Chain, RunConfig, RunTerms
from muster.chain.log_store import DEVELOPMENT_CHAIN
from muster.chain.reader import CONFIRMED_S
from muster.inference.engine import Request, Sample
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ChainError, ConfigError, StorageError, TaskError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.recipe import PromptRecipe, Recipe
from muster.protocol.rollouts import MAX_FILE_BYTES, MAX_ROWS
from muster.settings import read_document
from muster.shardcast import ChunkStore, state_hash
from muster.tasks import TaskSet, dialogue_of, identities
from muster.tasks.admission import Trial, admit
from muster.toploc import Calibration
from muster.toploc.wire import chunk_shapes
from muster.trainer.config import TrainerSettings, load_recipe
from muster.trainer.economics import cheats_of, read_fixed, refuse_unsafe, terms_of
from muster.trainer.ports import PolicyRoots
from muster.trainer.publish.policies import BASE, MappedWeights, eos_token_ids, policy_files
from muster.trainer.publish.publisher import Publisher

if TYPE_CHECKING:
    from muster.inference.engine import InferenceEngine
    from muster.inference.transformers_engine import TransformersEngine
    from muster.trainer.measure.evaluate import Evaluation

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
TRIED = 64
"""Problems graded to check a task set before a run is created; `muster tasks check` tries more."""
CHECKED, CHECKED_TOKENS = 4, 256
"""Number of samples in the timed check, and the most tokens of each."""
CONFIRMATIONS = 20
"""Blocks on top of a new run before anything relies on its number; none on a development chain."""
PAUSE_S = 4.0
"""Seconds between looks at them."""
TOKEN_BYTES = 4
"""Bytes of a token in a submission's file, before compression."""
IMAGE_PYTHON = "3.11"
"""The Python of the container image (ops/container/Containerfile)."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The parts of a new run."""

    model: Path
    """Base model folder."""
    recipe: Recipe
    """Recipe that the run will pin, before its verifiers are filled in."""
    task_set: Path
    """File of the problems."""
    calibration: Path
    """File of the validation limits."""
    trainer: Address
    """Account that publishes policies."""
    orchestrator: Address
    """Account that signs tickets and commits batches."""
    validators: Sequence[Address]
    """Accounts that are invited to sign outcomes."""
    quorum: int
    """Number of validators that must agree."""
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
    """Folder that receives recipe, calibration and task set, each named by its hash."""
    admits_anyway: bool = False
    """Whether to use a task set even if it is not admitted."""
    accepts_unsafe_economics: bool = False
    """Whether to create the run even if cheating pays under its terms."""


Agree = Callable[[Chain, RunConfig], Awaitable[None]]
"""Called after all checks with the configuration to create; raises to cancel."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents that a run pins beside its model."""

    recipe: Recipe
    """The recipe, with its verifiers."""
    calibration: Calibration
    """The validation limits."""
    task_set: TaskSet
    """The problems."""

    def hashes(self) -> dict[str, Hash32]:
        """Return their hashes by name."""
        return {
            "recipe": self.recipe.hash(),
            "calibration": self.calibration.hash(),
            "task_set": self.task_set.hash(),
        }

    def write(self, folder: Path) -> None:
        """Write each under its hash."""
        folder.mkdir(parents=True, exist_ok=True)
        for document in (self.recipe, self.calibration):
            (folder / document.hash().hex()).write_bytes(document.to_bytes())
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
    starts. Raises ConfigError when the parts do not fit or cheating would pay: before anything is
    written or sent.
    """
    files = model_files(plan.model)
    if trainer is not None and address_of(trainer) != plan.trainer:
        raise ConfigError(f"the trainer's key is of {address_of(trainer)}, not of {plan.trainer}")
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
        await _require_safe_economics(plan, documents.calibration, config.terms, chain)
        if agree is not None:
            await agree(chain, config)
        documents.write(plan.documents)
        is_small = chain.chain_id == DEVELOPMENT_CHAIN
        run_id = await create_and_fund(
            chain, config, plan.fund_wei, confirmations=0 if is_small else CONFIRMATIONS
        )
    created: dict[str, Any] = {"run_id": int(run_id)}
    created |= {f"{name}_hash": hex0x(value) for name, value in hashes.items()}
    created["base_model_hash"] = hex0x(config.base_model_hash)
    if trainer is not None:
        root = await _publish_base(plan, run_id, rpc, deployments, trainer)
        created["policy_root"] = hex0x(root)
    return created


async def create_and_fund(
    chain: Chain,
    config: RunConfig,
    fund_wei: int,
    *,
    confirmations: int,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> RunId:
    """Create a run and pay in; returns its number once `confirmations` blocks are on top of it.

    A reorganisation may give its number to another run: nothing is paid in before. Raises
    ChainError when it is not confirmed in time.
    """
    creation, waited_s = chain.once("create run"), 0.0
    while True:
        # The label sends it once, and again only if it was taken back: perhaps under a new number.
        run_id, receipt = await creation.runs.create_run(config)
        if await chain.block_number() - receipt.block_number >= confirmations:
            break
        if waited_s >= CONFIRMED_S:
            raise ChainError(
                f"run {run_id} is created, but not confirmed by {confirmations} blocks",
                hint="pay in with `muster run fund` once it is",
            )
        logger.info("waiting for the run to be confirmed", extra={"run": run_id})
        await sleep(PAUSE_S)
        waited_s += PAUSE_S
    logger.info("run created", extra={"run": run_id})
    if fund_wei:
        (run_owner,) = await chain.read("RunRegistry", "ownerOf", [run_id])
        if run_owner != chain.me:
            raise ChainError(f"run {run_id} is another owner's: nothing was paid in")
        await chain.token.approve(chain.deployment.contracts["RewardEscrow"], fund_wei)
        await chain.escrow.fund(run_id, fund_wei)
    return run_id


async def _require_safe_economics(
    plan: RunPlan, calibration: Calibration, run: RunTerms, chain: Chain
) -> None:
    """Raise ConfigError when cheating pays under the run's terms, unless the plan accepts it."""
    terms = terms_of(plan.recipe, calibration, run, await read_fixed(chain))
    try:
        refuse_unsafe(terms, cheats_of(calibration))
    except ConfigError as refused:
        if not plan.accepts_unsafe_economics:
            raise
        logger.warning("run created although cheating pays", extra={"reason": str(refused)})


def model_files(folder: Path) -> dict[str, Path]:
    """Return the files of a base model; raises StorageError, EngineError or ConfigError when
    workers or the trainer could not load them, or not all alike."""
    from muster.inference.policy_files import (
        as_engine_error,
        read_config,
        require_fixed_positions,
        require_one_reading,
    )

    files = policy_files(folder)
    if TOKENIZER_FILE not in files:
        raise StorageError(
            f"{folder} has no {TOKENIZER_FILE}: workers could not read a prompt",
            hint="add the model's tokenizer: tokenizer.save_pretrained(folder) writes it",
        )
    require_one_reading(folder)
    with as_engine_error(f"policy folder {folder} does not load"):
        config = read_config(folder)
        require_fixed_positions(config)
    eos_token_ids(folder)
    with as_engine_error(f"policy folder {folder} does not load"):
        twins = _unequal_twins(config, files)
    if twins:
        raise ConfigError(
            f"{' and '.join(twins)} of {folder} differ, but its config.json ties them: engines "
            "would compute with one or with both",
            hint="set tie_word_embeddings to false in config.json, or remove one of the two",
        )
    return files


def _unequal_twins(config: Any, files: Mapping[str, Path]) -> tuple[str, ...]:
    """Return the names of two weights of a model that are tied and yet stored with two values."""
    import torch
    from transformers import AutoModelForCausalLM

    weights = MappedWeights(path for name, path in files.items() if name.endswith(".safetensors"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for names in model.all_tied_weights_keys.items():
        if all(name in weights for name in names):
            first, second = (weights[name] for name in names)
            if first.dtype != second.dtype or not torch.equal(first, second):
                return tuple(names)
    return ()


def check_documents(plan: RunPlan) -> Documents:
    """Return the documents that the run pins beside its model.

    The recipe is pinned together with the verifiers that graded the task set here. Raises
    ConfigError or TaskError when the parts are invalid or do not fit together.
    """
    task_set = TaskSet.open(plan.task_set)
    task_set.require_parts(plan.recipe)
    task_types = _admitted_task_types(plan, task_set)
    recipe = pinned_recipe(plan.recipe, task_types, plan.model)
    if unusual := pythons_beside_image([each.version for each in recipe.verifiers]):
        logger.warning(
            "the run pins a Python that the container image does not have: all nodes need it, and "
            "jurors without it restore no honest work",
            extra={"pinned": ", ".join(unusual), "image": IMAGE_PYTHON},
        )
    calibration = _calibration(plan)
    require_files_fit(plan.recipe, calibration.model.hidden_size)
    return Documents(recipe, calibration, task_set)


def _admitted_task_types(plan: RunPlan, task_set: TaskSet) -> list[str]:
    """Return the task types of a set; raises TaskError when it should not be relied on."""
    trial = Trial(sample=TRIED, hacked=1, allows_judge=plan.recipe.allows_judge)
    found = admit(task_set, trial)
    if not found.is_admitted:
        if not plan.admits_anyway:
            raise TaskError(
                f"{plan.task_set} is refused: {found.summary()}",
                hint="see why with `muster tasks check`, or accept the set with --admit-anyway",
            )
        logger.warning(
            "refused task set accepted with --admit-anyway", extra={"reason": found.summary()}
        )
    return sorted(found.task_types)


def pythons_beside_image(versions: Iterable[str]) -> list[str]:
    """Return the Pythons that versions of verifiers name, without the container image's."""
    named = {each for version in versions for each in re.findall(r"ython (\d+\.\d+)", version)}
    return sorted(named - {IMAGE_PYTHON})


def pinned_recipe(recipe: Recipe, task_types: Iterable[str], model: Path | None) -> Recipe:
    """Return the recipe as a run over these task types pins it: with the verifiers installed here
    and the text of the model's chat template.

    Raises ConfigError when the prompt does not fit the model or the tasks.
    """
    task_types = list(task_types)
    recipe = recipe.model_copy(update={"verifiers": identities(task_types)})
    if recipe.prompt == PromptRecipe():
        return recipe
    if model is None:
        raise ConfigError(
            "the recipe's [prompt] is pinned together with the model's chat template",
            hint="give the base model as well: --model FOLDER",
        )
    talks = [name for name in task_types if dialogue_of(name)]
    if talks and (recipe.prompt.form, recipe.prompt.reply_role) == ("chat", "none"):
        raise ConfigError(
            f"tasks of type {talks[0]!r} have replies, but the recipe sets no role for them",
            hint="set prompt.reply_role to 'user' or 'tool'",
        )
    from muster.inference.framing import pin_prompt

    recipe = pin_prompt(recipe, model)
    # A recipe that is too long to be read back must not be pinned.
    return Recipe.from_bytes(recipe.to_bytes())


def read_calibration(path: Path) -> Calibration:
    """Return a calibration; raises ConfigError or EncodingError that names the file."""
    hint = "give the file that `muster calibrate` wrote, with --calibration"
    return read_document(Calibration, path, hint=hint)


def _calibration(plan: RunPlan) -> Calibration:
    """Return the calibration; raises ConfigError when it was measured for another recipe."""
    calibration = read_calibration(plan.calibration)
    misfit = calibration.misfit(plan.recipe)
    if None in (calibration.submission_samples, calibration.max_new_tokens):
        misfit = misfit or "does not say how large the submissions are that its limits hold for"
    if misfit:
        raise ConfigError(
            f"{plan.calibration} {misfit}",
            hint="measure again with this recipe: muster calibrate --recipe FILE",
        )
    return calibration


async def _publish_base(
    plan: RunPlan, run_id: RunId, rpc: str, deployments: Path, key: bytes
) -> Hash32:
    async with await Chain.connect(rpc, deployments, key=key) as chain:
        publisher = Publisher(
            ChunkStore(plan.store),
            PolicyRoots(chain, run_id),
            run_id=run_id,
            domain=chain.domain("RunRegistry"),
            key=key,
        )
        return await publisher.publish(BASE, plan.model, 0, 0)


def resolve(
    settings: TrainerSettings, recipe_file: Path | None, task_set_file: Path | None
) -> dict[str, Any]:
    """Return the resolved settings, and the recipe with the hash that a run pins for it.

    The hash covers the verifiers, so it needs the task set. Without a recipe there is neither
    recipe nor hash.
    """
    found: dict[str, Any] = {"settings": settings.model_dump(mode="json")}
    if recipe_file is None:
        return found
    if task_set_file is None:
        raise ConfigError(
            "a recipe is pinned together with the verifiers of its tasks",
            hint="give the problems as well: --task-set FILE",
        )
    task_types = {problem.task_type for problem in TaskSet.open(task_set_file)}
    recipe = pinned_recipe(load_recipe(recipe_file), task_types, settings.model)
    found |= {"recipe": recipe.model_dump(mode="json"), "recipe_hash": hex0x(recipe.hash())}
    return found


@dataclass(frozen=True, slots=True)
class ModelTrial:
    """How much of a task set a base model is tried on."""

    problems: int
    """Problems, evenly spread over the set."""
    samples: int
    """Completions per problem."""
    device: str = "cpu"
    """Where the model computes."""
    threads: int = 1
    """CPU threads of the model."""


def largest_file(recipe: Recipe, hidden_size: int) -> int:
    """Return the bytes of a submission in which every completion has the longest allowed length."""
    sampling, proof = recipe.sampling, recipe.proof
    shapes = chunk_shapes(
        sampling.max_new_tokens, hidden_size, chunk_tokens=proof.chunk_tokens, topk=proof.topk
    )
    row = sum(shape.proof_bytes for shape in shapes) + TOKEN_BYTES * sampling.max_new_tokens
    return sampling.problems_per_submission * sampling.samples_per_problem * row


def require_files_fit(recipe: Recipe, hidden_size: int) -> None:
    """Raise ConfigError when a submission of long completions would be refused for its size."""
    sampling = recipe.sampling
    rows = sampling.problems_per_submission * sampling.samples_per_problem
    if rows > MAX_ROWS:
        raise ConfigError(
            f"a submission of {rows} samples does not fit an outcome record: at most {MAX_ROWS}",
            hint="lower sampling.problems_per_submission or sampling.samples_per_problem",
        )
    size = largest_file(recipe, hidden_size)
    if size > MAX_FILE_BYTES:
        raise ConfigError(
            f"a submission of {rows} samples of {sampling.max_new_tokens} tokens can take "
            f"{size / 2**20:,.1f} MiB with its proofs, the limit is {MAX_FILE_BYTES >> 20} MiB",
            hint=_smaller(recipe, size / MAX_FILE_BYTES),
        )


def _smaller(recipe: Recipe, factor: float) -> str:
    """Return the smallest change of a recipe that makes its submissions smaller by the factor."""
    sampling = recipe.sampling
    problems = int(sampling.problems_per_submission / factor)
    if problems:
        return f"set sampling.problems_per_submission = {problems}"
    tokens = int(sampling.max_new_tokens * sampling.problems_per_submission / factor)
    tokens -= tokens % recipe.proof.chunk_tokens
    return (
        "set sampling.problems_per_submission = 1, and "
        f"sampling.max_new_tokens = {max(1, tokens)} or fewer samples_per_problem"
    )


@dataclass(frozen=True, slots=True)
class CheckTime:
    """How long a validator takes for a check, measured on the machine that tried the model."""

    per_token_s: float
    """Seconds per token of prompt or completion."""
    prompt_tokens: float
    """Mean tokens of a prompt."""
    device: str
    """Device of the measurement."""

    def longest_s(self, recipe: Recipe) -> float:
        """Return the seconds for a submission of completions of the longest allowed length."""
        sampling = recipe.sampling
        rows = sampling.problems_per_submission * sampling.samples_per_problem
        return rows * (sampling.max_new_tokens + self.prompt_tokens) * self.per_token_s


def measure_check(
    engine: InferenceEngine, task_set: TaskSet, recipe: Recipe, device: str
) -> CheckTime:
    """Return how long it takes to check a few completions of the loaded model; blocking."""
    sampling, some = recipe.sampling, task_set.some(CHECKED)
    prompts = [tuple(engine.encode(problem.prompt)) for problem in some]
    limit = min(sampling.max_new_tokens, CHECKED_TOKENS)
    asked = [
        Request(prompt, seed, sampling.temperature, limit) for seed, prompt in enumerate(prompts)
    ]
    made = engine.generate(asked, proof=recipe.proof)
    samples = [
        Sample(each.prompt_tokens, found.tokens, each.seed, found.proofs)
        for each, found in zip(asked, made, strict=True)
    ]
    tokens = sum(len(each.prompt_tokens) + len(each.completion_tokens) for each in samples)
    started = time.perf_counter()
    engine.examine(samples, proof=recipe.proof, temperature=sampling.temperature)
    per_token_s = (time.perf_counter() - started) / tokens
    return CheckTime(per_token_s, sum(map(len, prompts)) / len(prompts), device)


def require_checkable(recipe: Recipe, check: CheckTime, deadline_s: int) -> None:
    """Raise ConfigError when a validator could not check one submission before outcomes are due."""
    longest_s = check.longest_s(recipe)
    if longest_s <= deadline_s:
        return
    raise ConfigError(
        f"a submission of long completions takes about {longest_s:,.0f} s to check on "
        f"{check.device}, but outcomes are due {deadline_s:,} s after they are committed",
        hint=f"{_smaller(recipe, longest_s / deadline_s)}; or give the validators' "
        "device with --device",
    )


def try_model(plan: RunPlan, trial: ModelTrial) -> tuple[Evaluation, CheckTime]:
    """Return the base model's results on a sample of the problems, and how long a check takes;
    blocking.

    Raises EngineError when the model does not load, ConfigError when the calibration is of another.
    """
    from muster.inference.framing import pin_prompt
    from muster.inference.transformers_engine import TransformersEngine
    from muster.trainer.measure.evaluate import Evaluator

    engine = TransformersEngine(threads=trial.threads, device=trial.device)
    engine.load_policy(plan.model, BASE)
    require_calibrated(_calibration(plan), engine, plan.model)
    recipe = pin_prompt(plan.recipe, plan.model)
    task_set = TaskSet.open(plan.task_set)
    some = task_set.some(trial.problems)
    evaluator = Evaluator(some, engine, recipe, samples=trial.samples)
    found = evaluator.evaluate(plan.model, BASE)
    return found, measure_check(engine, some, recipe, trial.device)


def require_calibrated(calibration: Calibration, engine: TransformersEngine, folder: Path) -> None:
    """Raise ConfigError when the limits were measured on a model of another shape."""
    measured = calibration.model
    found = (type(engine.model).__name__, engine.hidden_size, engine.vocab_size)
    if found != (measured.architecture, measured.hidden_size, measured.vocab_size):
        name, hidden, vocabulary = found
        raise ConfigError(
            f"{folder} is a {name} of width {hidden} and vocabulary {vocabulary}, the calibration "
            f"is of a {measured.architecture} of {measured.hidden_size} and {measured.vocab_size}",
            hint="measure this model: muster calibrate --model FOLDER",
        )
