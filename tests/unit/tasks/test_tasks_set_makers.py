"""Generated sets: toy families, and those that packages announce."""

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from task_packages import forget, install

from muster.protocol.errors import TaskError
from muster.tasks import Graded, Problem, TaskSet, verify
from muster.tasks.registry import installed_makers, load_makers, maker_of
from muster.tasks.toys import make_arithmetic, make_reverse, make_sort, split_sort

MAKERS = [make_arithmetic, make_reverse, make_sort]
Make = Callable[[int, int], TaskSet]


@pytest.fixture(autouse=True)
def _packages() -> Iterator[None]:
    yield
    forget()


@given(st.sampled_from(MAKERS), st.integers(1, 60), st.integers(-5, 5))
def test_toy_set_follows_from_its_seed_and_its_gold_is_right(
    make: Make, count: int, seed: int
) -> None:
    tasks = make(count, seed)
    assert len(tasks) == count
    assert tasks == make(count, seed)
    assert tasks != make(count, seed + 1)
    assert all(verify(p, p.gold_standard_solution or "") == Graded(1.0) for p in tasks)
    assert all(verify(p, (p.gold_standard_solution or "") + "0") == Graded(0.0) for p in tasks)


def test_toy_problems_read_as_documented() -> None:
    (reverse,) = make_reverse(1, 0)
    assert reverse.prompt[:-1][::-1] == reverse.gold_standard_solution
    (sums,) = make_arithmetic(1, 0)
    assert str(eval(sums.prompt[:-1])) == sums.gold_standard_solution


@pytest.mark.parametrize("make", MAKERS)
def test_more_problems_than_there_are_is_refused(make: Make) -> None:
    with pytest.raises(TaskError, match="not 10000000"):
        make(10_000_000, 0)


def test_package_announces_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from muster.tasks.toys import make_reverse as make\n"
    install(tmp_path, monkeypatch, source, "[muster.task_sets]\ntheirs = third_party:make\n")
    maker = maker_of("theirs")
    assert (maker.package, maker.version, maker.module) == ("third-party", "1.2", "third_party")
    assert maker.make(3, 1) == make_reverse(3, 1)
    before = maker.code_hash
    (tmp_path / "third_party.py").write_text(source + "# changed\n")
    assert maker.code_hash != before


@pytest.mark.parametrize(
    ("name", "target", "reason"),
    [
        ("reverse", "muster.tasks.toys:make_sort", "two task sets are called 'reverse'"),
        ("theirs", "no_such_module:make", "cannot load the task set"),
        ("theirs", "muster.tasks.toys:nothing", "cannot load the task set"),
        ("theirs", "muster.tasks.toys:LETTERS", "is no function"),
    ],
)
def test_announcement_that_is_no_maker_is_refused(name: str, target: str, reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        load_makers([EntryPoint(name, target, "muster.task_sets")])


def test_unknown_set_is_refused_with_those_there_are() -> None:
    with pytest.raises(TaskError) as caught:
        maker_of("none")
    assert all(name in (caught.value.hint or "") for name in installed_makers())


def test_demo_set_is_the_same_for_the_same_seed() -> None:
    # A change of this hash changes every run made of the task set.
    expected = "1c71a59fc09c2b38c862671115de2b23fd6b7c14838b94286ab5050f37b68775"
    assert make_sort(100, seed=7).hash().hex() == expected
    assert make_sort(100, seed=8).hash() != make_sort(100, seed=7).hash()


@given(st.integers(0, 2**32), st.integers(2, 4))
def test_problems_are_sorted_by_their_gold(seed: int, digits: int) -> None:
    for problem in make_sort(10, seed, digits=digits):
        text = problem.prompt.removesuffix("=")
        assert len(text) == digits
        assert problem.gold_standard_solution == "".join(sorted(text))
        assert verify(problem, "".join(sorted(text))) == Graded(1.0)
        assert problem.prompt == f"{text}="


@given(st.integers(0, 2**32))
def test_held_out_problems_are_disjoint_and_different(seed: int) -> None:
    training, held_out = split_sort(60, 40, seed, digits=2)
    prompts = {problem.prompt for problem in training} | {problem.prompt for problem in held_out}
    assert len(prompts) == 100


def test_more_problems_than_inputs_are_refused() -> None:
    with pytest.raises(TaskError, match="only 40 inputs"):
        split_sort(60, 41, 0, digits=2)


def problem(prompt: str) -> Problem:
    return Problem(problem_id="a", task_type="exact_match", prompt=prompt)
