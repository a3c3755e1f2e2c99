"""The assignment of a ticket, its rollouts, and the documents that it depends on."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.client_chain import UNREACHABLE
from worlds.client_world import (
    BEACON,
    CALIBRATION,
    RECIPE,
    RULES,
    RUN,
    TASK_SET,
    VERSION,
    WORKER,
    HashEngine,
    make_rollouts,
    make_ticket,
)

from muster.client.calibration import prompts_of, read_recipe, read_task_set
from muster.client.run_documents import fetch_rules, require_consistent
from muster.client.tickets import derive
from muster.client.worker.generation import play_ticket
from muster.lifecycle import outage
from muster.lifecycle.outage import Outage
from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.errors import ApiError, ConfigError, EncodingError, EngineError, TaskError
from muster.protocol.ids import Hash32
from muster.protocol.prompts import Prompt, text_of
from muster.protocol.rollouts import count_units
from muster.tasks import Graded, TaskSet, Undecided, exact_match, identities, registry

ENGINE = HashEngine()


def draw(purpose: int, counter: int) -> int:
    """Return docs/protocol.md section 4's draw for the test ticket, written out."""
    seed = keccak(abi_words(RUN, BEACON, address_bytes(WORKER), 4, 0))
    return int.from_bytes(keccak(abi_words(seed, purpose, counter))[:8], "big")


# The assignment


def test_assignment_is_what_the_protocol_derives() -> None:
    groups = derive(make_ticket(), RECIPE, TASK_SET, ENGINE).groups
    expected = list(dict.fromkeys(draw(0, i) % len(TASK_SET) for i in range(9)))[:2]
    assert [group.problem for group in groups] == [TASK_SET[i] for i in expected]
    assert groups[1].seeds == (draw(2, 2), draw(2, 3))
    assert [group.target_length for group in groups] == [-1, -1]
    assert groups[0].prompt_tokens == ENGINE.encode(groups[0].problem.prompt)


def test_target_lengths_are_derived_and_asked_for() -> None:
    sampling = RECIPE.sampling.model_copy(update={"target_lengths": (5, 7, 9)})
    texts: list[str] = []

    class Reading(HashEngine):
        def encode(self, text: Prompt, *, is_start: bool = True) -> tuple[int, ...]:
            assert is_start
            texts.append(text_of(text))
            return (1,)

    recipe = RECIPE.model_copy(update={"sampling": sampling})
    groups = derive(make_ticket(), recipe, TASK_SET, Reading()).groups
    lengths = [(5, 7, 9)[draw(1, j) % 3] for j in range(2)]
    assert [group.target_length for group in groups] == lengths
    assert all(f"{n} tokens" in text for n, text in zip(lengths, texts, strict=True))


@pytest.mark.parametrize("change", [{"index": 1}, {"step": 5}, {"beacon": keccak(b"x")}])
def test_other_tickets_derive_something_else(change: dict[str, object]) -> None:
    one, other = (
        derive(ticket, RECIPE, TASK_SET, ENGINE)
        for ticket in (make_ticket(), make_ticket(**change))
    )
    assert one.groups[0].seeds != other.groups[0].seeds


def test_task_set_with_too_few_problems_derives_nothing() -> None:
    small = TaskSet.of("small", "1", TASK_SET.problems[:1])
    with pytest.raises(EncodingError):
        derive(make_ticket(), RECIPE, small, ENGINE)


# The rollouts


def test_rollouts_stand_in_ticket_order_with_their_seeds() -> None:
    rows = make_rollouts(make_ticket())
    assert [(row.group, row.sample) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row.sampling_seed for row in rows] == [draw(2, i) for i in range(4)]
    assert {row.policy_version for row in rows} == {VERSION}


def test_units_are_completion_tokens_capped_per_sample() -> None:
    rows = make_rollouts(make_ticket())
    lengths = [len(row.completion_tokens) for row in rows]
    assert count_units(rows, 6) == sum(lengths)
    assert count_units(rows, 2) == sum(min(n, 2) for n in lengths)


def test_answer_that_cannot_be_graded_gives_no_submission() -> None:
    problems = [p.model_copy(update={"gold_standard_solution": None}) for p in TASK_SET]
    ungraded = TaskSet.of("no gold", "1", problems)
    with pytest.raises(TaskError, match="cannot be graded"):
        play_ticket(make_ticket(), RECIPE, ungraded, HashEngine(VERSION)).graded()


def test_machine_that_cannot_grade_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Undecided("killed", is_disturbance=True)
    found = iter([away, away, Graded(1.0), *[Graded(0.0)] * 3])
    grader = replace(exact_match.VERIFIER, grade=lambda *_: next(found, away))
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": grader})
    rows = play_ticket(make_ticket(), RECIPE, TASK_SET, HashEngine(VERSION)).graded()
    assert [row.task_reward for row in rows] == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(EngineError, match="cannot be graded: killed"):
        play_ticket(make_ticket(), RECIPE, TASK_SET, HashEngine(VERSION)).graded()


# Documents


PINNED: Any = SimpleNamespace(
    recipe_hash=RECIPE.hash(), calibration_hash=CALIBRATION.hash(), task_set_hash=TASK_SET.hash()
)
HONEST = {each.hash(): each.to_bytes() for each in (RECIPE, CALIBRATION, TASK_SET)}
REFUSAL = ApiError("no such document", status=404, code="not_found")
OTHER = RECIPE.model_copy(update={"name": "other"})
FEWER, TURNED = (
    TaskSet.of(TASK_SET.name, TASK_SET.version, problems).to_bytes()
    for problems in (TASK_SET.problems[:5], TASK_SET.problems[::-1])
)


class Source:
    """Returns the run's documents, or given bytes; first it raises some errors."""

    def __init__(self, *errors: ApiError, **said: bytes) -> None:
        self.errors = list(errors)
        self.documents = HONEST | {getattr(PINNED, name): data for name, data in said.items()}

    async def document(self, name: Hash32) -> bytes:
        if self.errors:
            raise self.errors.pop()
        return self.documents[name]

    async def download(self, name: Hash32, path: Path, *, max_bytes: int) -> None:
        data = await self.document(name)
        assert len(data) <= max_bytes
        path.write_bytes(data)


@pytest.mark.parametrize("error", [UNREACHABLE, REFUSAL], ids=["silent", "refusing"])
async def test_documents_are_taken_from_the_disk_before_an_orchestrator(
    tmp_path: Path, error: ApiError
) -> None:
    assert await fetch_rules(Source(), PINNED, tmp_path) == RULES
    async with asyncio.timeout(5):
        assert await fetch_rules(Source(*[error] * 99), PINNED, tmp_path) == RULES


@pytest.mark.parametrize("name", vars(PINNED))
async def test_document_that_is_damaged_on_the_disk_is_fetched_again(
    tmp_path: Path, name: str
) -> None:
    assert await fetch_rules(Source(), PINNED, tmp_path) == RULES
    (path,) = tmp_path.glob(f"{getattr(PINNED, name).hex()}.*")
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(ConfigError, match="not the one on chain"):
        await fetch_rules(Source(**{name: b""}), PINNED, tmp_path)
    assert await fetch_rules(Source(), PINNED, tmp_path) == RULES
    assert {each.read_bytes() for each in tmp_path.iterdir()} == set(HONEST.values())


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("recipe_hash", OTHER.to_bytes()),
        ("calibration_hash", OTHER.to_bytes()),
        ("task_set_hash", FEWER),
        ("task_set_hash", TURNED),
        ("task_set_hash", b"junk"),
    ],
)
async def test_another_document_is_refused_whatever_it_says_and_not_kept(
    tmp_path: Path, name: str, data: bytes
) -> None:
    with pytest.raises(ConfigError, match="not the one on chain") as caught:
        await fetch_rules(Source(**{name: data}), PINNED, tmp_path)
    assert "dishonest" in (caught.value.hint or "")
    assert {path.read_bytes() for path in tmp_path.iterdir()} < set(HONEST.values())


async def test_malformed_document_is_refused_whoever_pinned_it_and_not_kept(tmp_path: Path) -> None:
    pinned: Any = SimpleNamespace(**vars(PINNED) | {"recipe_hash": keccak(b"{}")})
    source = Source()
    source.documents[pinned.recipe_hash] = b"{}"
    with pytest.raises(EncodingError, match="malformed recipe"):
        await fetch_rules(source, pinned, tmp_path)
    assert not list(tmp_path.iterdir())


async def test_documents_are_waited_for_while_the_orchestrator_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "Outage", lambda what: Outage(what, first_s=0.001))
    assert await fetch_rules(Source(UNREACHABLE, UNREACHABLE), PINNED, tmp_path) == RULES


async def test_refused_documents_are_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="no such document"):
        await fetch_rules(Source(REFUSAL), PINNED, tmp_path)


def test_documents_that_contradict_each_other_are_refused() -> None:
    hotter = RECIPE.sampling.model_copy(update={"temperature": 2.0})
    recipe = RECIPE.model_copy(update={"sampling": hotter})
    with pytest.raises(ConfigError, match="measured with other proofs or at another temperature"):
        require_consistent(type(RULES)(recipe, TASK_SET, CALIBRATION))
    small = TaskSet.of("small", "1", TASK_SET.problems[:1])
    with pytest.raises(TaskError, match="a submission needs 2"):
        type(RULES)(RECIPE, small, CALIBRATION)


@pytest.mark.parametrize("change", [{"max_new_tokens": 7}, {"samples_per_problem": 3}])
def test_limits_of_smaller_submissions_are_refused(change: dict[str, int]) -> None:
    sampling = RECIPE.sampling
    sizes = {
        "submission_samples": sampling.submission_samples,
        "max_new_tokens": sampling.max_new_tokens,
    }
    rules = replace(RULES, calibration=CALIBRATION.model_copy(update=sizes))
    require_consistent(rules)
    larger = RECIPE.model_copy(update={"sampling": sampling.model_copy(update=change)})
    with pytest.raises(ConfigError, match="holds for up to"):
        require_consistent(replace(rules, recipe=larger))
    require_consistent(replace(RULES, recipe=larger))


def test_task_set_that_cannot_be_graded_here_is_refused() -> None:
    problems = [p.model_copy(update={"task_type": "unheard of"}) for p in TASK_SET]
    with pytest.raises(TaskError, match="no verifier"):
        require_consistent(type(RULES)(RECIPE, TaskSet.of("x", "1", problems), CALIBRATION))


def test_verifier_other_than_the_pinned_one_is_refused() -> None:
    pinned = identities(["exact_match"])
    require_consistent(replace(RULES, recipe=RECIPE.model_copy(update={"verifiers": pinned})))
    other = tuple(identity.model_copy(update={"version": "0"}) for identity in pinned)
    with pytest.raises(TaskError, match="the run grades 'exact_match' by exact_match 0"):
        require_consistent(replace(RULES, recipe=RECIPE.model_copy(update={"verifiers": other})))


# Files of a run owner


def test_recipe_reads_alike_from_toml_and_canonical_json(tmp_path: Path) -> None:
    (tmp_path / "recipe").write_bytes(RECIPE.to_bytes())
    (tmp_path / "recipe.toml").write_text(
        'name = "test"\nmin_software = "0.1"\n'
        "[sampling]\nproblems_per_submission = 2\nsamples_per_problem = 2\n"
        "temperature = 1.0\nmax_new_tokens = 6\n[proof]\nchunk_tokens = 4\ntopk = 8\n"
        "[training]\nsubmissions_per_step = 1\n"
    )
    assert read_recipe(tmp_path / "recipe") == RECIPE
    assert read_recipe(tmp_path / "recipe.toml") == RECIPE


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("r.toml", b"name ="),
        ("r.toml", b'name = "x"'),
        ("r.toml", b"\xff"),
        ("r.toml", b"when = 2020-01-01"),
        ("r.json", b"{}"),
        ("r.json", json.dumps({"name": "spaced"}).encode()),
    ],
)
def test_file_that_is_no_recipe_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        read_recipe(tmp_path / name)


def test_missing_and_malformed_task_sets_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_task_set(tmp_path / "none")
    (tmp_path / "bad").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="is not a task set"):
        read_task_set(tmp_path / "bad")


def test_prompts_take_target_lengths_in_turn() -> None:
    sampling = RECIPE.sampling.model_copy(update={"target_lengths": (5, 7)})
    prompts = prompts_of(TASK_SET, RECIPE.model_copy(update={"sampling": sampling}))
    assert len(prompts) == len(TASK_SET)
    assert ["5 tokens" in prompts[0], "7 tokens" in prompts[1]] == [True, True]
