"""The trainer's surroundings in memory: a ledger, a file source, policy roots, submissions."""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from muster.protocol.encoding import file_hash, keccak
from muster.protocol.errors import ApiError, ChainUnreachable
from muster.protocol.ids import Hash32, PolicyVersion, Step
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.recipe import FilterRecipe, Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import Rollout, encode_rollouts

EOS = 1
"""The demo tokenizer's EOS."""


def make_recipe(**training: object) -> Recipe:
    """Two submissions of two groups of four samples make a step."""
    values: dict[str, object] = {
        "submissions_per_step": 2,
        "optimizer_steps": 1,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "kl_coefficient": 0.0,
        "entropy_coefficient": 0.0,
    }
    return Recipe(
        name="test",
        sampling=SamplingRecipe(
            problems_per_submission=2, samples_per_problem=4, temperature=1.0, max_new_tokens=6
        ),
        training=TrainingRecipe.model_validate({**values, **training}),
    )


def with_filters(recipe: Recipe, **filters: object) -> Recipe:
    """Return the recipe with these filters."""
    return recipe.model_copy(update={"filters": FilterRecipe.model_validate(filters)})


def make_rollouts(seed: int, version: int = 0, recipe: Recipe | None = None) -> list[Rollout]:
    """Return a submission's rollouts: random digits, half of the samples rewarded."""
    sampling = (recipe or make_recipe()).sampling
    rng = random.Random(seed)
    rows = []
    for group in range(sampling.problems_per_submission):
        prompt = (*(rng.randrange(3, 13) for _ in range(4)), 13)
        for sample in range(sampling.samples_per_problem):
            length = rng.randrange(1, sampling.max_new_tokens)
            completion = (*(rng.randrange(3, 13) for _ in range(length)), EOS)
            rows.append(
                Rollout(
                    problem_id=f"p{group}",
                    group=group,
                    sample=sample,
                    sampling_seed=rng.getrandbits(64),
                    target_length=-1,
                    policy_version=version,
                    prompt_tokens=prompt,
                    completion_tokens=completion,
                    proofs=b"proof",
                    task_reward=float(sample % 2),
                )
            )
    return rows


@cache
def _encoded(rollouts: tuple[Rollout, ...]) -> bytes:
    return encode_rollouts(list(rollouts))


@dataclass(frozen=True, slots=True)
class Item:
    """An accepted record at its place."""

    position_in_stream: int
    record: OutcomeRecord
    is_direct: bool = False
    """Whether its worker committed it to the chain itself."""


@dataclass
class FakeLedger:
    """A training stream that tests extend and rewrite."""

    items: list[Item] = field(default_factory=list)
    event: asyncio.Event = field(default_factory=asyncio.Event)

    def stream(self) -> Sequence[Item]:
        return self.items

    def is_direct(self, item: Item) -> bool:
        return item.is_direct

    async def changed(self) -> None:
        await self.event.wait()

    def accept(self, digest: Hash32, *, version: int = 0, rollouts: int = 8) -> OutcomeRecord:
        """Append an accepted record."""
        record = OutcomeRecord(
            worker_id=1,
            step=Step(1),
            index=len(self.items),
            policy_version=PolicyVersion(version),
            file_hash=digest,
            rollouts=rollouts,
            units=10,
            verdict=Verdict.ACCEPTED,
            reason=Reason.NONE,
        )
        self.items.append(Item(len(self.items), record))
        self.wake()
        return record

    def wake(self) -> None:
        self.event.set()
        self.event = asyncio.Event()


@dataclass
class FakeFiles:
    """Submission files by hash; `failures` says how often each is refused first."""

    stored: dict[Hash32, bytes] = field(default_factory=dict)
    failures: dict[Hash32, int] = field(default_factory=dict)
    lies: dict[Hash32, bytes] = field(default_factory=dict)
    asked: list[Hash32] = field(default_factory=list)

    def put(self, data: bytes) -> Hash32:
        self.stored[file_hash(data)] = data
        return file_hash(data)

    async def file(self, submission_file_hash: Hash32) -> bytes:
        self.asked.append(submission_file_hash)
        if self.failures.get(submission_file_hash, 0):
            self.failures[submission_file_hash] -= 1
            raise ApiError("no such file yet", status=404, code="not_found")
        if submission_file_hash in self.lies:
            return self.lies.pop(submission_file_hash)
        return self.stored[submission_file_hash]


@dataclass
class Feed:
    """A ledger and the files its records name."""

    ledger: FakeLedger = field(default_factory=FakeLedger)
    files: FakeFiles = field(default_factory=FakeFiles)

    def submit(self, rollouts: list[Rollout], *, version: int | None = None) -> Hash32:
        """Accept a file of these rollouts."""
        digest = self.files.put(_encoded(tuple(rollouts)))
        claimed = rollouts[0].policy_version if version is None else version
        self.ledger.accept(digest, version=claimed, rollouts=len(rollouts))
        return digest

    def submit_many(self, seeds: Iterable[int], *, version: int = 0) -> None:
        """Accept one file per seed."""
        for seed in seeds:
            self.submit(make_rollouts(seed, version))


@dataclass
class FakeRoots:
    """Published roots; `errors` are raised by the next publications, after sending if `late`."""

    roots: dict[PolicyVersion, Hash32] = field(default_factory=dict)
    errors: list[tuple[Exception, bool]] = field(default_factory=list)
    sent: list[PolicyVersion] = field(default_factory=list)
    unreachable: int = 0
    """How many of the next questions for a root get no answer."""
    coming: dict[PolicyVersion, Hash32] = field(default_factory=dict)
    """Roots that an earlier process sent, and that are mined when they are waited for."""

    async def settle(self) -> None:
        self.roots |= self.coming

    async def root_of(self, version: PolicyVersion) -> Hash32 | None:
        if self.unreachable:
            self.unreachable -= 1
            raise ChainUnreachable("gone")
        return self.roots.get(version)

    async def newest(self) -> PolicyVersion | None:
        return max(self.roots, default=None)

    async def publish(self, version: PolicyVersion, root: Hash32) -> None:
        self.sent.append(version)
        if self.errors:
            error, is_late = self.errors.pop(0)
            if is_late:
                self.roots[version] = root
            raise error
        self.roots[version] = root


@dataclass
class FakeSink:
    """Collects figures."""

    posted: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    async def post_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.posted.append((step, dict(metrics)))


async def no_sleep(_seconds: float) -> None:
    """Yield to other tasks, and go on at once."""
    await asyncio.sleep(0)


def with_reward(rollouts: list[Rollout], reward: float) -> list[Rollout]:
    """Return the rollouts, all with the same reward."""
    return [replace(rollout, task_reward=reward) for rollout in rollouts]


KEY = keccak(b"trainer")
"""The trainer's key."""
