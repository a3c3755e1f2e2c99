"""`make bench-data`: a million rows exported as a data set, and checked: time and memory.

The submissions are made up: 64 rows each, with lognormal lengths of 100 tokens on average. The file
hashes are those that a ledger would hold; `make bench-audit` measures the reading of a ledger. Each
measurement is a process of its own, with one thread; `ARGS=--rows N` makes it smaller.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks import report

from muster.client.dataset.export import export_rows, put_card
from muster.client.dataset.folder import DataFolder, DataOrigin
from muster.client.dataset.rows import Accepted, RowMaker, Texts
from muster.client.dataset.selection import HeldOut, Selection, SelectionSettings
from muster.client.dataset.verify import (
    check_bytes,
    check_card,
    check_outcomes,
    check_rows,
    check_rules,
)
from muster.protocol.encoding import file_hash, hex0x, keccak
from muster.protocol.ids import Hash32, PolicyVersion, Step, to_address
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.rollouts import SCHEMA
from muster.tasks import Problem, TaskSet

PROBLEMS, SAMPLES = 8, 8
"""Problems of a submission, and samples of each."""
MEAN_TOKENS = 100
WORDS = 8000
TASKS = 20_000
EOS = WORDS
ROOT = keccak(b"policy")
WORKER = to_address("0x" + "11" * 20)
RECIPE = Recipe(
    name="bench",
    sampling=SamplingRecipe(
        problems_per_submission=PROBLEMS,
        samples_per_problem=SAMPLES,
        temperature=1.0,
        max_new_tokens=4096,
    ),
    training=TrainingRecipe(submissions_per_step=1),
)


@dataclass
class MadeUp:
    """A stream of submissions, and the files behind it."""

    folder: Path
    records: list[OutcomeRecord] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, place: int) -> Accepted:
        return Accepted(place, place // 64, place % 64, WORKER, self.records[place], ROOT)

    def overturned(self) -> set[int]:
        """Return the empty set."""
        return set()

    async def find_file(self, wanted: Hash32) -> bytes:
        """Return a file."""
        return (self.folder / wanted.hex()).read_bytes()

    def make(self, rows: int) -> None:
        """Write the files of `rows` rows."""
        rng = np.random.default_rng(0)
        size = PROBLEMS * SAMPLES
        for place in range(-(-rows // size)):
            data = _submission(rng, size)
            digest = file_hash(data)
            (self.folder / digest.hex()).write_bytes(data)
            self.records.append(_record(place, digest, size))
        (self.folder / "hashes").write_text("\n".join(r.file_hash.hex() for r in self.records))

    def load(self) -> MadeUp:
        """Load the files of `make`."""
        names = (self.folder / "hashes").read_text().split()
        size = PROBLEMS * SAMPLES
        self.records = [_record(i, Hash32(bytes.fromhex(n)), size) for i, n in enumerate(names)]
        return self


def _record(place: int, digest: Hash32, size: int) -> OutcomeRecord:
    return OutcomeRecord(
        worker_id=1,
        step=Step(place + 1),
        index=0,
        policy_version=PolicyVersion(0),
        file_hash=digest,
        rollouts=size,
        units=size,
        verdict=Verdict.ACCEPTED,
        reason=Reason.NONE,
    )


def _submission(rng: np.random.Generator, size: int) -> bytes:
    lengths = np.clip(rng.lognormal(np.log(MEAN_TOKENS) - 0.125, 0.5, size), 2, 4000).astype(int)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = rng.integers(0, WORDS, ends[-1], dtype=np.int32)
    tokens[ends[1:] - 1] = EOS
    item = SCHEMA.field("completion_tokens").type
    problems = np.repeat(rng.integers(0, TASKS, PROBLEMS), SAMPLES)
    prompts = pa.array([[int(n) % WORDS] for n in problems], item)
    columns: dict[str, Any] = {
        "problem_id": [f"p{n}" for n in problems],
        "group": np.repeat(np.arange(PROBLEMS, dtype=np.int32), SAMPLES),
        "sample": np.tile(np.arange(SAMPLES, dtype=np.int32), PROBLEMS),
        "sampling_seed": rng.integers(0, 2**63, size, dtype=np.uint64),
        "target_length": np.full(size, -1, np.int32),
        "policy_version": np.zeros(size, np.uint32),
        "prompt_tokens": prompts,
        "completion_tokens": pa.ListArray.from_arrays(pa.array(ends), pa.array(tokens)).cast(item),
        "proofs": [b"\0" * 258 * 4] * size,
        "task_reward": rng.integers(0, 2, size).astype(float),
    }
    table = pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _save_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    vocabulary = {f"word{n}": n for n in range(WORDS)} | {"<eos>": EOS}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.save_pretrained(folder)
    Qwen3Config(vocab_size=WORDS + 1, eos_token_id=EOS).save_pretrained(folder)
    return folder


def _maker(folder: Path) -> RowMaker:
    problems = [
        Problem(problem_id=f"p{n}", task_type="exact_match", prompt=f"word{n % WORDS}")
        for n in range(TASKS)
    ]
    return RowMaker(RECIPE, TaskSet.of("bench", "1", problems), Texts(folder / "model"))


def _export(folder: Path) -> dict[str, Any]:
    stream: Any = MadeUp(folder / "files").load()
    origin = DataOrigin(1, WORKER, 1, hex0x(RECIPE.hash()), "0x", hex0x(ROOT))
    out = DataFolder.continue_or_begin(
        folder / "traces", origin, SelectionSettings(test_share=0.02)
    )
    selection = Selection(out.export.settings, HeldOut())
    asyncio.run(export_rows(out, stream, _maker(folder), selection, stream.find_file))
    put_card(out, stream)
    return {"rows": sum(each.rows for each in out.export.files()), "parts": len(out.export.parts)}


def _verify_ledger(folder: Path) -> dict[str, Any]:
    stream: Any = MadeUp(folder / "files").load()
    out = DataFolder.open(folder / "traces")
    checks = [
        check_bytes(out),
        check_outcomes(out, stream),
        check_rules(out, HeldOut()),
        check_card(out, stream),
    ]
    return {"passed": all(check.passed for check in checks)}


def _verify_files(folder: Path) -> dict[str, Any]:
    stream: Any = MadeUp(folder / "files").load()
    out = DataFolder.open(folder / "traces")
    check = asyncio.run(check_rows(out, stream, _maker(folder), stream.find_file, HeldOut()))
    return {"passed": check.passed and not check.is_open}


_MEASURES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "export": _export,
    "verify, ledger": _verify_ledger,
    "verify, files": _verify_files,
}


def _apart(name: str, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.training.data_set", "--measure", name, folder]
    began = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"wall_s": time.perf_counter() - began}


def _measure(name: str, folder: Path) -> None:
    found = _MEASURES[name](folder)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = {"cpu_s": used.ru_utime + used.ru_stime, "rss_mb": used.ru_maxrss / 1024}
    print(json.dumps(found | cost))


def main() -> None:
    """Make the files, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--measure", nargs=2, metavar=("NAME", "FOLDER"))
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if options.measure:
        _measure(options.measure[0], Path(options.measure[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "files").mkdir()
        _save_tokenizer(Path(folder) / "model")
        MadeUp(Path(folder) / "files").make(options.rows)
        found = {name: _apart(name, folder) for name in _MEASURES}
    rows = [
        (name, f"{each['cpu_s']:.1f}", f"{each['wall_s']:.1f}", f"{each['rss_mb']:.0f}")
        for name, each in found.items()
    ]
    title = f"{options.rows:,} rows as a data set"
    report.print_table(title, ("", "CPU s", "wall s", "RSS MB"), rows)
    if not all(each.get("passed", True) for each in found.values()):
        raise SystemExit("a check found a fault in an honest data set")
    if options.rows == 1_000_000:
        metrics = {
            "data_1m_cpu_s": sum(each["cpu_s"] for each in found.values()),
            "data_1m_rss_mb": max(each["rss_mb"] for each in found.values()),
        }
        report.write("data", metrics, found, measured_on=report.machine())


if __name__ == "__main__":
    main()
