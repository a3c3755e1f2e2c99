"""Problems that a policy sets aside are not derived; invalid lists have no effect."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.client_world import (
    CALIBRATION,
    RECIPE,
    VERSION,
    make_claim,
    make_submission,
    make_ticket,
)
from worlds.mixture_world import RULES as MIXED, TASKS, Engine

from muster.client.disputes.bundle_checks import CheckAnswer, check_weights
from muster.client.tickets import derive, list_fault, most_prompt_tokens
from muster.client.validator.judging import Judgement, Rules, examine, say_list_fault
from muster.client.worker.generation import play_ticket
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion, RunId
from muster.protocol.messages import Reason, Ticket, Verdict
from muster.protocol.mixture import PartFilters, TasksRecipe
from muster.protocol.prompts import text_of
from muster.protocol.recipe import FilterRecipe
from muster.protocol.rollouts import Rollout
from muster.protocol.set_aside import FILE_NAME, MAX_BYTES, ListFault, SetAside
from muster.shardcast import ChunkStore, Manifest
from muster.tasks import TaskSet
from muster.tasks.toys import make_sort

SORTS = make_sort(24, seed=3)
RULES = Rules(
    RECIPE.model_copy(update={"filters": FilterRecipe(pool_window=4, pool_revisit=4)}),
    SORTS,
    CALIBRATION,
)
EVEN = SetAside.of(range(0, 24, 2), 24)
TICKETS = [make_ticket(index=index) for index in range(40)]


def holding(bits: SetAside | bytes, tmp_path: Path) -> Engine:
    """An engine that has loaded a policy folder with this list."""
    (tmp_path / FILE_NAME).write_bytes(bits if isinstance(bits, bytes) else bits.bits)
    engine = Engine()
    engine.load_policy(tmp_path, VERSION)
    return engine


def places(ticket: Ticket, engine: Engine, rules: Rules = RULES) -> list[int]:
    """Return the index of each problem that a ticket derives."""
    known = {problem.problem_id: place for place, problem in enumerate(rules.task_set)}
    groups = derive(ticket, rules.recipe, rules.task_set, engine).groups
    return [known[group.problem.problem_id] for group in groups]


def judge(rows: list[Rollout], ticket: Ticket, engine: Engine, rules: Rules = RULES) -> Judgement:
    claim = make_claim(make_submission(ticket, rows), ticket)
    return examine(claim, rows, rules, engine)


def rows_of(ticket: Ticket, engine: Engine, rules: Rules = RULES) -> list[Rollout]:
    return play_ticket(ticket, rules.recipe, rules.task_set, engine).graded()


def test_listed_problems_come_up_only_where_they_are_revisited(tmp_path: Path) -> None:
    plain = [place for ticket in TICKETS for place in places(ticket, Engine(VERSION))]
    engine = holding(EVEN, tmp_path)
    drawn = [place for ticket in TICKETS for place in places(ticket, engine)]
    shares = [sum(place in EVEN for place in found) / len(found) for found in (plain, drawn)]
    assert 0.35 < shares[0] < 0.65
    # One draw in four may take a listed problem; half of the problems are listed.
    assert 0.02 < shares[1] < 0.25


def test_recipe_that_skips_none_looks_at_no_list(tmp_path: Path) -> None:
    """An old run's policies may have a file of that name: it means nothing."""
    rules = replace(RULES, recipe=RECIPE)
    engine, other = holding(EVEN, tmp_path), Engine(PolicyVersion(77))
    for ticket in TICKETS[:8]:
        assert places(ticket, engine, rules) == places(ticket, other, rules)
    assert list_fault(RECIPE, SORTS, SetAside(b"nonsense")) is None


def test_worker_and_validator_with_the_policy_s_list_agree(tmp_path: Path) -> None:
    engine = holding(EVEN, tmp_path)
    for ticket in TICKETS[:4]:
        assert judge(rows_of(ticket, engine), ticket, engine).finding is None


@pytest.mark.parametrize("theirs", [SetAside(), SetAside.of(range(1, 24, 2), 24)])
def test_worker_with_another_list_is_a_fraud(theirs: SetAside, tmp_path: Path) -> None:
    """It draws as if no problem were listed, or by another list, and is honest otherwise."""
    engine = holding(EVEN, tmp_path)
    other = Engine(VERSION)
    other.set_aside = theirs
    ticket = next(t for t in TICKETS if places(t, engine) != places(t, other))
    found = judge(rows_of(ticket, other), ticket, engine).finding
    assert found is not None
    assert (found.verdict, found.reason) == (Verdict.FRAUD, Reason.WRONG_PROBLEM)


@pytest.mark.parametrize(
    ("bits", "fault"),
    [
        (SetAside.of(range(24), 24), ListFault.TOO_MANY),
        (SetAside.of(range(22), 24), ListFault.TOO_MANY),
        (SetAside.of([24], 32), ListFault.LENGTH),
        (b"\1\2", ListFault.LENGTH),
        (b"[0, 2, 4]\n", ListFault.LENGTH),
        (b"\0\0\0\1", ListFault.LENGTH),
        (b"\1" * (MAX_BYTES + 8), ListFault.LENGTH),
    ],
)
def test_list_that_does_not_hold_sets_nothing_aside(
    bits: SetAside | bytes, fault: ListFault, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An invalid list harms nobody: worker and validator derive as without it, and say why."""
    engine, plain = holding(bits, tmp_path), Engine(VERSION)
    assert list_fault(RULES.recipe, SORTS, engine.set_aside) is fault
    ticket = TICKETS[0]
    assert places(ticket, engine) == places(ticket, plain)
    assert judge(rows_of(ticket, engine), ticket, engine).finding is None
    say_list_fault(RULES, engine)
    assert [record.__dict__["reason"] for record in caplog.records] == [str(fault)]


def test_list_of_unknown_problems_sets_nothing_aside(tmp_path: Path) -> None:
    rules = replace(RULES, task_set=make_sort(21, seed=3))
    engine = holding(SetAside.of([0, 22], 24), tmp_path)
    assert list_fault(rules.recipe, rules.task_set, engine.set_aside) is ListFault.UNKNOWN
    assert places(TICKETS[0], engine, rules) == places(TICKETS[0], Engine(VERSION), rules)


def test_list_that_holds_is_said_nothing_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say_list_fault(RULES, holding(EVEN, tmp_path))
    assert not caplog.records


def test_ticket_of_another_policy_than_the_loaded_one_is_not_derived(tmp_path: Path) -> None:
    engine = holding(EVEN, tmp_path)
    with pytest.raises(EngineError, match="engine holds policy 3, the ticket is of 2"):
        places(make_ticket(policy_version=PolicyVersion(2)), engine)


def test_bound_of_prompts_is_that_of_the_problems_past_the_list() -> None:
    """A file is checked against this bound before its policy is loaded."""
    longest = SORTS[0].model_copy(update={"problem_id": "long", "prompt": "1" * 400})
    rules = replace(RULES, task_set=TaskSet.of("x", "1", [longest, *make_sort(23, seed=3)]))
    listed = SetAside.of([0], 24)
    found = set()
    for ticket in TICKETS:
        engine = Engine(VERSION)
        engine.set_aside = listed
        most = most_prompt_tokens(ticket, rules.recipe, rules.task_set, listed)
        groups = derive(ticket, rules.recipe, rules.task_set, engine).groups
        assert most == 8 * max(len(text_of(g.problem.prompt)) for g in groups) + 256
        found.add(most)
    plain = {most_prompt_tokens(t, RECIPE, rules.task_set, listed) for t in TICKETS}
    assert sum(most > 3000 for most in plain) == 1
    assert len(found) <= 2


# Mixtures


def mixed(filters: dict[str, PartFilters]) -> Rules:
    parts = tuple(
        part.model_copy(update={"filters": filters.get(part.name)})
        for part in MIXED.recipe.tasks.parts
    )
    return replace(
        MIXED, recipe=MIXED.recipe.model_copy(update={"tasks": TasksRecipe(parts=parts)})
    )


SKIPS = PartFilters(pool_window=2, pool_revisit=1000)


def test_each_part_skips_by_its_own_filters(tmp_path: Path) -> None:
    """Both parts keep their weights: a list of one part does not affect the other."""
    rules = mixed({"turns": SKIPS})
    engine = holding(SetAside.of(range(20, 28), 32), tmp_path)
    for ticket in TICKETS:
        drawn, plain = (places(ticket, each, rules) for each in (engine, Engine(VERSION)))
        assert [TASKS.part_at(i) for i in drawn] == [TASKS.part_at(i) for i in plain]
        assert not set(drawn) & set(range(20, 28))


@pytest.mark.parametrize(
    ("indices", "fault"), [(range(5), ListFault.PART), (range(20, 31), ListFault.TOO_MANY)]
)
def test_list_of_a_part_that_skips_none_or_has_too_few_left_does_not_hold(
    indices: range, fault: ListFault, tmp_path: Path
) -> None:
    rules = mixed({"turns": SKIPS})
    engine = holding(SetAside.of(indices, 32), tmp_path)
    assert list_fault(rules.recipe, TASKS, engine.set_aside) is fault
    assert places(TICKETS[0], engine, rules) == places(TICKETS[0], Engine(VERSION), rules)


# Folders that others give


def test_folder_with_a_list_that_its_manifest_lacks_is_not_the_policy(tmp_path: Path) -> None:
    """Judging from such a folder would derive other problems than the run's."""
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")

    def publish(version: int) -> Manifest:
        return ChunkStore(tmp_path / "store").publish(
            {path.name: path for path in folder.iterdir()},
            run_id=RunId(1),
            version=PolicyVersion(version),
            stream_from=0,
            stream_to=0,
            sign=lambda _: bytes(65),
        )

    without = publish(1)
    assert check_weights(without, folder).answer is CheckAnswer.AGREE
    (folder / FILE_NAME).write_bytes(EVEN.bits)
    found = check_weights(without, folder)
    assert found.answer is CheckAnswer.CONTRADICT
    assert FILE_NAME in found.detail
    of_list = publish(2)
    assert check_weights(of_list, folder).answer is CheckAnswer.AGREE
    (folder / FILE_NAME).write_bytes(SetAside.of([1], 24).bits)
    assert check_weights(of_list, folder).answer is CheckAnswer.CONTRADICT
    (folder / FILE_NAME).unlink()
    assert check_weights(of_list, folder).answer is CheckAnswer.CONTRADICT


def put_more_weights(folder: Path) -> None:
    (folder / "more.safetensors").write_bytes(b"more")


def put_ends(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{}")


def put_a_hidden_file(folder: Path) -> None:
    (folder / ".DS_Store").write_bytes(b"hidden")


def put_a_pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def put_a_device(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")


def put_a_longer_file(folder: Path) -> None:
    (folder / "config.json").write_text("{} ")


@pytest.mark.parametrize(
    ("change", "answer", "says"),
    [
        (put_a_hidden_file, CheckAnswer.AGREE, "version 1"),
        (put_more_weights, CheckAnswer.CONTRADICT, "more.safetensors lies beside"),
        (put_ends, CheckAnswer.CONTRADICT, "generation_config.json lies beside"),
        (put_a_pipe, CheckAnswer.CONTRADICT, "config.json is not as its manifest says"),
        (put_a_device, CheckAnswer.CONTRADICT, "config.json is not as its manifest says"),
        (put_a_longer_file, CheckAnswer.CONTRADICT, "config.json is not as its manifest says"),
    ],
)
def test_a_policy_is_the_files_of_its_manifest_and_no_others(
    tmp_path: Path, change: Callable[[Path], None], answer: CheckAnswer, says: str
) -> None:
    """Engines would read other files, too, and wait for what is no file."""
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    manifest = ChunkStore(tmp_path / "store").publish(
        {"config.json": folder / "config.json"},
        run_id=RunId(1),
        version=PolicyVersion(1),
        stream_from=0,
        stream_to=0,
        sign=lambda _: bytes(65),
    )
    change(folder)
    found = check_weights(manifest, folder)
    assert found.answer is answer
    assert says in found.detail
