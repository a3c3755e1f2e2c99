"""A run's accepted submissions without a chain, from which data sets are made."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from muster.client.dataset.folder import DataFolder, DataOrigin
from muster.client.dataset.rows import Accepted, RowMaker, Texts
from muster.client.dataset.selection import SelectionSettings
from muster.protocol.encoding import file_hash, hex0x, keccak
from muster.protocol.errors import ApiError
from muster.protocol.ids import Hash32, PolicyVersion, Step, to_address
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe, VerifierIdentity
from muster.protocol.rollouts import Rollout, encode_rollouts
from muster.tasks import Problem, TaskSet
from muster.tasks.document import SetPart

CHARACTERS = "0123456789=abcdef"
EOS, PAD = len(CHARACTERS), len(CHARACTERS) + 1
ROOT = keccak(b"policy")
WORKER = to_address("0x" + "11" * 20)
RECIPE = Recipe(
    name="traces",
    sampling=SamplingRecipe(
        problems_per_submission=2, samples_per_problem=3, temperature=1.0, max_new_tokens=8
    ),
    training=TrainingRecipe(submissions_per_step=1),
    verifiers=(
        VerifierIdentity(
            task_type="exact_match", name="exact_match", version="2", code_hash="0x" + "00" * 32
        ),
    ),
)
ALL = SelectionSettings()
ORIGIN = DataOrigin(
    chain_id=31337,
    ledger=to_address("0x" + "22" * 20),
    run_id=1,
    recipe=hex0x(RECIPE.hash()),
    task_set=hex0x(keccak(b"tasks")),
    tokenizer=hex0x(ROOT),
)


def save_tokenizer(folder: Path) -> Path:
    """Write a policy's folder without weights; one token a character."""
    vocabulary = {c: i for i, c in enumerate(CHARACTERS)} | {"<eos>": EOS, "<pad>": PAD}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)
    Qwen3Config(vocab_size=len(vocabulary), eos_token_id=EOS).save_pretrained(folder)
    return folder


def task_set(count: int = 8) -> TaskSet:
    """Return problems p0, p1, … that ask to repeat their number; each half is a part."""
    problems = [
        Problem(problem_id=f"p{n}", task_type="exact_match", prompt=f"{n}=") for n in range(count)
    ]
    half = count // 2
    parts = (SetPart("low", "halves 1", half), SetPart("high", "halves 1", count - half))
    return TaskSet.of("traces", "1", problems, parts)


def tokens(text: str, *, ends: bool = True) -> tuple[int, ...]:
    """Return a completion's tokens."""
    return (*(CHARACTERS.index(c) for c in text), *((EOS,) if ends else ()))


def rollout(problem: int, completion: Sequence[int], reward: float, row: int) -> Rollout:
    """Return a sample of a problem."""
    group, sample = divmod(row, 3)
    return Rollout(
        problem_id=f"p{problem}",
        group=group,
        sample=sample,
        sampling_seed=row,
        target_length=-1,
        policy_version=0,
        prompt_tokens=tokens(f"{problem}=", ends=False),
        completion_tokens=tuple(completion),
        proofs=b"",
        task_reward=reward,
    )


@dataclass
class Traces:
    """A stream of submissions that a test fills, and the files behind it."""

    folder: Path
    accepted: list[Accepted] = field(default_factory=list)
    files: dict[Hash32, bytes] = field(default_factory=dict)
    disputed: set[int] = field(default_factory=set)
    asked: list[Hash32] = field(default_factory=list)
    """Files that were asked for, in order."""

    def __post_init__(self) -> None:
        self.maker = self.maker_of(RECIPE)

    def maker_of(self, recipe: Recipe) -> RowMaker:
        """Return the maker of the rows of a run with this recipe."""
        return RowMaker(recipe, task_set(), Texts(save_tokenizer(self.folder / "model")))

    def add(self, *rollouts: Rollout) -> Accepted:
        """Add a submission at the end of the stream."""
        data = encode_rollouts(list(rollouts))
        place = len(self.accepted)
        record = OutcomeRecord(
            worker_id=1,
            step=Step(place + 1),
            index=0,
            policy_version=PolicyVersion(0),
            file_hash=file_hash(data),
            rollouts=len(rollouts),
            units=sum(len(each.completion_tokens) for each in rollouts),
            verdict=Verdict.ACCEPTED,
            reason=Reason.NONE,
        )
        made = Accepted(place, 10 + place, 0, WORKER, record, ROOT)
        self.accepted.append(made)
        self.files[record.file_hash] = data
        return made

    def add_counting(self, count: int, *, first: int = 0) -> None:
        """Add `count` submissions of six rows with different completions."""
        for n in range(first, first + count):
            texts = [f"{n * 6 + row:05d}"[-5:] for row in range(6)]
            self.add(
                *(
                    rollout((2 * n + row // 3) % 8, tokens(text), row % 2, row)
                    for row, text in enumerate(texts)
                )
            )

    def __len__(self) -> int:
        return len(self.accepted)

    def __getitem__(self, place: int) -> Accepted:
        return self.accepted[place]

    def overturned(self) -> set[int]:
        return self.disputed

    async def find_file(self, wanted: Hash32) -> bytes:
        self.asked.append(wanted)
        if wanted not in self.files:
            raise ApiError("nobody has it", status=503, code="no_source")
        return self.files[wanted]

    @property
    def stream(self) -> Any:
        """The run's stream as the code under test sees it."""
        return self

    def data_folder(self, settings: SelectionSettings = ALL) -> DataFolder:
        """Return the data set's folder, as a new process opens it."""
        return DataFolder.continue_or_begin(self.folder / "traces", ORIGIN, settings)
