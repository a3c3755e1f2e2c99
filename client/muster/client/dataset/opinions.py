"""A judge model's replies about the answers in a data set, in a file with their proofs.

The ledger proves that a judged reward was accepted, not that the judge gave it. A holder of the
judge's model folder can ask it again about every row and keep its replies with their proofs. A
reply can then be verified by one forward pass, even on a machine where the judge would sample
another reply.

    {"data":root,"format":"muster-opinions","judge":hash of its weights,"version":1}
    {"place":3,"proofs":["…"],"row":0,"text":"{\"score\": 80}","tokens":[…]}
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from muster.client.audit.contradictions import Check
from muster.client.dataset.folder import DataFolder
from muster.client.dataset.verify import Faults
from muster.inference.engine_judge import EngineJudge, Opinion
from muster.lifecycle.files import whole_file
from muster.protocol.encoding import canonical_json, hex0x, parse_canonical_json
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import Hash32
from muster.tasks import TaskSet
from muster.tasks.judge import MAX_ANSWER_CHARS, VERIFIER, WITHOUT_GOLD, judge_prompt, parse_score
from muster.tasks.registry import installed_verifiers
from muster.telemetry import Progress
from muster.toploc import Calibration

FORMAT, VERSION = "muster-opinions", 1
NAME = "opinions.jsonl"
"""Default name of the file, in the data set's folder."""
MAX_LINE_BYTES = 1 << 20
"""A longer line is refused."""
TOGETHER = 16
"""Questions in one batch."""
_COLUMNS = ("stream_position", "row", "task_type", "problem_id", "problem", "answer", "reward")


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """A row whose reward a judge gave."""

    place: int
    """Place of its submission in the training stream."""
    row: int
    """Row number in the submission's file."""
    question: str
    """The prompt for the judge."""
    reward: float

    def __str__(self) -> str:
        return f"row {self.row} of place {self.place} of the stream"


def judged_rows(folder: DataFolder, task_set: TaskSet | None) -> Iterator[JudgedRow]:
    """Yield the rows that a judge is asked about, in the files' order.

    `task_set` has the reference answers; raises ConfigError where one is needed and missing.
    """
    references = {}
    if task_set is not None:
        references = {each.problem_id: each.gold_standard_solution for each in task_set}
    verifiers = installed_verifiers()
    for part in folder.export.parts:
        for _, table in folder.tables(part, _COLUMNS):
            for row in table.to_pylist():
                verifier, reference = verifiers.get(row["task_type"]), None
                if verifier is VERIFIER:
                    reference = references.get(row["problem_id"])
                    if reference is None:
                        raise ConfigError(
                            f"problem {row['problem_id']!r} is judged by a reference answer",
                            hint="--task-set FILE: the task set of the data set's run",
                        )
                elif verifier is not WITHOUT_GOLD:
                    continue
                # A longer answer scores 0 without asking the judge.
                if len(row["answer"]) <= MAX_ANSWER_CHARS:
                    question = judge_prompt(row["problem"], reference, row["answer"])
                    yield JudgedRow(row["stream_position"], row["row"], question, row["reward"])


def write_opinions(
    path: Path, header: bytes, judge: EngineJudge, rows: Iterable[JudgedRow], show: Progress
) -> list[Check]:
    """Ask the judge about the rows; return a check whether it confirms their rewards.

    The file appears atomically. Raises ConfigError when no row was judged.
    """
    waiting, rewards, count = iter(rows), Faults("rewards"), 0
    with whole_file(path) as partial:
        with partial.open("wb") as file:
            file.write(header + b"\n")
            while some := list(islice(waiting, TOGETHER)):
                opinions = judge.opinions([row.question for row in some])
                for row, opinion in zip(some, opinions, strict=True):
                    file.write(_line(row, opinion) + b"\n")
                    _compare(row, opinion, rewards)
                show(count := count + len(some), 0)
        if not count:
            raise ConfigError("no row of the data set has a reward of a judge")
    return [rewards.check(f"the judge gives {count:,} rows their rewards")]


def check_opinions(
    path: Path,
    header: bytes,
    judge: EngineJudge,
    calibration: Calibration,
    rows: Iterable[JudgedRow],
    show: Progress,
) -> list[Check]:
    """Return checks whether the judge produced the replies in the file, and whether they give the
    rows their rewards. `calibration` has the limits of the judge's model.
    """
    replies, rewards, count = Faults("opinions"), Faults("rewards"), 0
    try:
        lines = _read_lines(path, header)
        for row in rows:
            opinion = _opinion(next(lines, b""), row)
            if fault := judge.fault_of(row.question, opinion, calibration):
                replies.add(f"{row}: {fault}")
            _compare(row, opinion, rewards)
            show(count := count + 1, 0)
        if next(lines, None) is not None:
            raise EncodingError(f"more than the {count:,} rows that were judged")
    except EncodingError as error:
        replies.add(f"{path} {error}")
    return [
        replies.check(f"{count:,} replies are the judge's"),
        rewards.check(f"they give {count:,} rows their rewards"),
    ]


def header_of(folder: DataFolder, weights: Hash32) -> bytes:
    """Return the first line of the opinions of a judge with these weights on a data set."""
    names = {"data": hex0x(folder.export.root()), "judge": hex0x(weights)}
    return canonical_json({**names, "format": FORMAT, "version": VERSION})


def _compare(row: JudgedRow, opinion: Opinion, rewards: Faults) -> None:
    """Note a row whose reward is not the reply's score."""
    score = parse_score(opinion.text)
    if score is None:
        rewards.add(f"{row} has {row.reward:g}, the reply {opinion.text[:40]!r} is no score")
    elif score / 100 != row.reward:
        rewards.add(f"{row} has {row.reward:g}, the judge gives {score / 100:g}")


def _line(row: JudgedRow, opinion: Opinion) -> bytes:
    proofs = [proof.hex() for proof in opinion.proofs]
    said = {"tokens": list(opinion.tokens), "proofs": proofs, "text": opinion.text}
    return canonical_json({"place": row.place, "row": row.row, **said})


def _read_lines(path: Path, header: bytes) -> Iterator[bytes]:
    """Yield the lines after the first; raises EncodingError for another first line."""
    try:
        with path.open("rb") as file:
            if file.readline(MAX_LINE_BYTES) != header + b"\n":
                raise EncodingError("is about another data set, or of another judge")
            while line := file.readline(MAX_LINE_BYTES):
                yield line
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="`muster data judge` writes it"
        ) from error


def _opinion(line: bytes, row: JudgedRow) -> Opinion:
    """Parse a line's opinion; raises EncodingError when it is about another row."""
    if not line.endswith(b"\n"):
        raise EncodingError(f"ends before {row}")
    value = parse_canonical_json(line[:-1], max_bytes=MAX_LINE_BYTES)
    try:
        proofs = tuple(bytes.fromhex(proof) for proof in value["proofs"])
        opinion = Opinion(tuple(map(int, value["tokens"])), proofs, str(value["text"]))
    except (KeyError, TypeError, ValueError) as error:
        raise EncodingError(f"has a malformed line where {row} is expected: {error}") from error
    if _line(row, opinion) != line[:-1]:
        raise EncodingError(f"has another line where {row} is expected")
    return opinion
