"""Sites that train one policy apart: the outer step, the exchange, losses and new arrivals."""

import json
import math
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from functools import partial
from itertools import chain, combinations, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from muster.lifecycle import free_port
from muster.protocol.encoding import keccak
from muster.protocol.errors import TrainingCollapsed
from muster.protocol.ids import PolicyVersion, RunId, Step
from muster.trainer.publish.policies import PolicyShelf
from muster.trainer.recover.checkpoint import Checkpoints, Identity, TrainerState
from muster.trainer.sites import meeting
from muster.trainer.sites.meeting import (
    MARK_BYTES,
    Meeting,
    MeetingPlace,
    Roll,
    Round,
    Seal,
    SiteLost,
    site_secret,
)
from muster.trainer.sites.site_learner import (
    BLOCK,
    Mean,
    OuterHistory,
    OuterStep,
    SiteLearner,
    byte_size,
    joined,
    mean_of,
    mean_over_sites,
    quantised,
    restored,
    split,
)
from muster.trainer.stream.reader import Cursor

# -------------------------------------------------------------------------------- outer step


@given(st.integers(0, 2**32 - 1), st.floats(1e-12, 1e6))
def test_quantised_numbers_are_within_half_a_scale(seed: int, size: float) -> None:
    values = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(seed)) * size
    data = quantised(values)
    back = restored(data)
    limit = values.view(-1, BLOCK).abs().amax(1, keepdim=True) / 127 * 0.5001
    assert len(data) == byte_size(len(values))
    assert bool(((back - values).view(-1, BLOCK).abs() <= limit).all())


@given(st.integers(0, 2**32 - 1))
def test_quantised_numbers_are_quantised_again_without_change(seed: int) -> None:
    values = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed))
    once = restored(quantised(values))
    assert torch.allclose(restored(quantised(once)), once, rtol=1e-6, atol=0)


def test_rounding_is_to_the_nearest_and_even_at_ties() -> None:
    values = torch.zeros(BLOCK)
    values[:5] = torch.tensor([127.0, 0.5, 1.5, -0.5, -2.5])
    assert restored(quantised(values))[:5].tolist() == [127.0, 0.0, 2.0, 0.0, -2.0]


def test_zeros_stay_zeros() -> None:
    assert not restored(quantised(torch.zeros(BLOCK))).any()


def test_tensors_become_one_vector_and_back() -> None:
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(7), "c": torch.randn(())}
    flat = joined(tensors, parts=3)
    assert len(flat) == 3 * BLOCK
    assert all(torch.equal(v, tensors[n]) for n, v in split(flat, tensors).items())


def test_outer_step_is_torch_s_nesterov() -> None:
    reference = torch.nn.Parameter(torch.randn(20))
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    outer, weights = OuterStep(0.7, 0.9), {"w": reference.detach().clone()}
    for seed in range(5):
        moved = torch.randn(20, generator=torch.Generator().manual_seed(seed))
        reference.grad = moved
        optimizer.step()
        weights = outer.apply(weights, {"w": moved})
        torch.testing.assert_close(weights["w"], reference.detach(), rtol=1e-5, atol=1e-6)


def test_outer_step_of_one_without_momentum_is_the_mean() -> None:
    start = {"w": torch.tensor([4.0, 8.0])}
    ends = [torch.tensor([2.0, 8.0]), torch.tensor([4.0, 4.0])]
    moved = mean_of([start["w"] - end for end in ends])
    assert OuterStep(1.0, 0.0).apply(start, {"w": moved})["w"].tolist() == [3.0, 6.0]


# ------------------------------------------------------------------------------------- sites

SECRET = bytes(range(32))


class Toy:
    """A learner whose weights move by amounts that its groups give."""

    def __init__(self, fail: Callable[[], None] = lambda: None) -> None:
        self.w = torch.zeros(500)
        self.momentum = torch.zeros(500)
        self.taken: list[Any] = []
        self.learning_rate_scale = 1.0
        self._fail = fail

    def step(self, step: Step, groups: Sequence[Any]) -> Any:
        self._fail()
        self.taken.append((step, list(groups)))
        self.momentum = 0.5 * self.momentum + sum(map(float, groups))
        self.w = self.w - 0.1 * self.momentum
        return None

    def fault(self, _formats: Mapping[str, torch.dtype]) -> str | None:
        return None if bool(self.w.isfinite().all()) else "w"

    def weights(self) -> dict[str, Tensor]:
        return {"w": self.w}

    def pieces(self, formats: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        return iter([("w", self.w.to(formats["w"]))])

    def hold(self) -> Callable[[], None]:
        return lambda: None

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.w = weights["w"].clone()

    def state(self) -> dict[str, Tensor]:
        return {"model.w": self.w, "optimizer.w.m": self.momentum}

    def like(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {name: torch.zeros(size) for name, size in sizes.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.w, self.momentum = state["model.w"].clone(), state["optimizer.w.m"].clone()


class Shelf(PolicyShelf):
    """Policies of one weight, without a model's files."""

    def __init__(self) -> None:
        self.held: dict[int, dict[str, Tensor]] = {}

    def has(self, version: PolicyVersion) -> bool:
        return version in self.held

    def weights(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        return self.held[version]

    def write(self, version: PolicyVersion, weights: Mapping[str, Tensor]) -> Path:
        self.held[version] = {name: w.clone() for name, w in weights.items()}
        return Path()


class Site:
    """A site and its state."""

    def __init__(
        self, number: int, port: int, folder: Path, *, expected: int = 2, secret: bytes = SECRET
    ) -> None:
        place = MeetingPlace(number, "127.0.0.1", port, alive_s=0.5, wait_s=20.0)
        self.meeting = Meeting(place, expected=expected, secret=secret)
        self.toy = Toy()
        self.shelf = Shelf()
        identity = Identity(RunId(1), keccak(b"recipe"), 1)
        self.checkpoints = Checkpoints(folder / str(number), identity)
        self.learner = SiteLearner(
            self.toy,
            self.meeting,
            OuterStep(0.7, 0.5),
            self.checkpoints,
            self.shelf,
            max_async_level=2,
        )

    def step(self, number: int, groups: Sequence[float]) -> None:
        """Take a step as the flow does: train, write the policy, save."""
        self.learner.step(Step(number), groups)  # type: ignore[arg-type]
        version = PolicyVersion(number)
        self.shelf.write(version, self.learner.weights())
        state = TrainerState(version, Cursor(number), number - 1, number - 2, {"pools": number})
        self.checkpoints.save(state, self.learner.state()).result(10)

    def close(self) -> None:
        self.meeting.close()
        self.checkpoints.close()


Start = Callable[..., Site]
"""Start site N of the expected number."""


@pytest.fixture
def port() -> int:
    """A free port."""
    return free_port()


@pytest.fixture
def start(port: int, tmp_path: Path) -> Iterator[Start]:
    """Start sites that meet at one port; all are closed at the end."""
    started: list[Site] = []

    def one(number: int, expected: int = 2) -> Site:
        started.append(Site(number, port, tmp_path, expected=expected))
        return started[-1]

    yield one
    for site in started:
        site.close()


def _together(*tasks: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(tasks)) as pool:
        futures = [pool.submit(task) for task in tasks]
        # The first failure is the cause; the other side would wait for its deadline.
        for future in as_completed(futures, 30):
            future.result()
        return [future.result() for future in futures]


def _sites(start: Start, count: int = 2) -> list[Site]:
    return _together(*(partial(start, number, count) for number in range(count)))


def test_sites_split_the_groups_and_hold_the_same_weights(start: Start) -> None:
    zero, one = _sites(start)

    def other() -> None:
        one.learner.join()
        for number in (1, 2, 3):
            one.step(number, [1.0, 2.0, 3.0])

    _together(lambda: [zero.step(n, [1.0, 2.0, 3.0]) for n in (1, 2, 3)], other)
    assert zero.toy.taken == [(n, [1.0, 3.0]) for n in (1, 2, 3)]
    assert one.toy.taken == [(n, [2.0]) for n in (1, 2, 3)]
    assert torch.equal(zero.toy.w, one.toy.w)
    assert zero.toy.w.any()
    assert not torch.equal(zero.toy.momentum, one.toy.momentum)
    # Three exchanges with one other site, a block of codes and its scale each way.
    assert zero.learner.outer_bytes == 3 * 2 * (byte_size(BLOCK) + MARK_BYTES)


def test_rate_of_a_run_that_rolled_back_is_that_of_the_site_s_own_steps(start: Start) -> None:
    zero = start(0)
    assert zero.learner.learning_rate_scale == 1.0
    zero.learner.learning_rate_scale = 0.5
    assert zero.toy.learning_rate_scale == zero.learner.learning_rate_scale == 0.5


def test_step_is_taken_again_without_a_site_that_died(start: Start) -> None:
    zero, one = _sites(start)

    def dying() -> None:
        one.learner.join()
        one.step(1, [1.0, 2.0, 3.0])
        one.learner._begin().close()
        one.meeting.close()

    _together(lambda: [zero.step(n, [1.0, 2.0, 3.0]) for n in (1, 2)], dying)
    assert zero.toy.taken == [(1, [1.0, 3.0]), (2, [1.0, 3.0]), (2, [1.0, 2.0, 3.0])]
    assert zero.learner.members == [0]


@pytest.mark.parametrize("at", [1, 2])
def test_site_that_read_other_records_leaves_and_the_others_go_on(start: Start, at: int) -> None:
    """A reorganisation may swap records between two sites' looks at the chain."""
    zero, one = _sites(start)

    def reads_otherwise() -> None:
        one.learner.join()
        for number in range(1, at):
            one.step(number, [1.0, 2.0])
        with pytest.raises(SiteLost, match="site 1 trained on other records than site 0"):
            one.step(at, [2.0, 1.0])

    _together(lambda: [zero.step(n, [1.0, 2.0]) for n in range(1, at + 1)], reads_otherwise)
    alone = (at, [1.0, 2.0])
    assert zero.toy.taken == [*((n, [1.0]) for n in range(1, at + 1)), alone]
    assert zero.learner.members == [0]


# ------------------------------------------------------------------ a site that is not finite


def _breaks_once(toy: Toy, at: int, value: float) -> None:
    """Let a weight be `value` after the first inner step `at`."""
    takes = toy.step

    def step(step: Step, groups: Sequence[Any]) -> None:
        is_first = all(taken != at for taken, _ in toy.taken)
        takes(step, groups)
        if step == at and is_first:
            toy.w[7] = value

    toy.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_site_that_is_not_finite_leaves_and_the_others_go_on(start: Start, value: float) -> None:
    zero, one = _sites(start)
    _breaks_once(one.toy, 2, value)

    def breaks() -> None:
        one.learner.join()
        one.step(1, [1.0, 2.0, 3.0])
        with pytest.raises(TrainingCollapsed, match=r"site 1 left step 2: .* not finite \(w\)"):
            one.step(2, [1.0, 2.0, 3.0])

    _together(lambda: [zero.step(n, [1.0, 2.0, 3.0]) for n in (1, 2)], breaks)
    assert zero.toy.taken == [(1, [1.0, 3.0]), (2, [1.0, 3.0]), (2, [1.0, 2.0, 3.0])]
    assert zero.learner.members == [0]
    assert bool(zero.toy.w.isfinite().all())


def test_movement_that_is_not_finite_is_not_averaged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A site may break after it looked at its weights."""
    zero, one = _sites(start)
    _breaks_once(one.toy, 1, math.nan)
    one.toy.fault = lambda _formats: None  # type: ignore[method-assign]
    _together(
        lambda: zero.step(1, [1.0, 2.0]), lambda: [one.learner.join(), one.step(1, [1.0, 2.0])]
    )
    assert zero.learner.members == [0, 1]
    assert torch.equal(zero.toy.w, one.toy.w)
    assert bool(zero.toy.w.isfinite().all())
    said = [each.__dict__["error"] for each in caplog.records if each.msg == "exchange failed"]
    assert "site 1 sent numbers that are not finite" in said


@pytest.mark.parametrize("scale", [math.nan, math.inf, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("broken", ["movement", "mean"])
def test_numbers_that_are_not_finite_are_their_sender_s(broken: str, scale: float) -> None:
    line, zero, one = _ends()
    sound = quantised(torch.ones(BLOCK))
    for kind in ("movement", "mean"):
        data = sound.clone()
        if kind == broken:
            data[BLOCK:].view(torch.float32)[0] = scale
        one.start_send(data, 0)
    # Site 1's messages are read from one end of the line, those of site 0 go to another.
    line.send = lambda *_: line  # type: ignore[method-assign]
    with pytest.raises(SiteLost, match="site 1 sent numbers that are not finite"):
        mean_over_sites(zero, torch.ones(2 * BLOCK))


def test_numbers_of_a_sound_site_are_averaged() -> None:
    line, zero, one = _ends()
    for _ in range(2):
        one.start_send(quantised(torch.full([BLOCK], 3.0)), 0)
    line.send = lambda *_: line  # type: ignore[method-assign]
    mean = mean_over_sites(zero, torch.ones(2 * BLOCK)).vector()
    torch.testing.assert_close(mean, torch.tensor([2.0, 3.0]).repeat_interleave(BLOCK))


# ----------------------------------------------------------------------- rounds that do not begin


def _dies_before_it_connects(site: Site, number: int) -> None:
    """Join a round and leave."""
    site.meeting._set(f"here/{number}/{site.meeting._place.site}", True)
    site.meeting.close()


def _dies_while_it_connects(site: Site, number: int) -> None:
    """Join a round, give an address to connect to, and leave."""
    site.meeting._set(f"here/{number}/{site.meeting._place.site}", True)
    assert site.meeting._link(number, [0, 1, 2]) is None
    site.meeting.close()


@pytest.mark.parametrize("dies", [_dies_before_it_connects, _dies_while_it_connects])
def test_no_site_trains_in_vain_when_another_dies_before_the_step(
    start: Start, dies: Callable[[Site, int], None]
) -> None:
    zero, one, two = _sites(start, 3)
    gone = threading.Event()

    def steps(site: Site) -> None:
        site.step(1, [1.0, 2.0, 3.0])
        gone.wait(20)
        site.step(2, [1.0, 2.0, 3.0])

    def dying() -> None:
        two.learner.join()
        two.step(1, [1.0, 2.0, 3.0])
        dies(two, 1)
        gone.set()

    _together(lambda: steps(zero), lambda: [one.learner.join(), steps(one)], dying)
    assert zero.toy.taken == [(1, [1.0]), (2, [1.0, 3.0])]
    assert one.toy.taken == [(1, [2.0]), (2, [2.0])]
    assert zero.learner.members == one.learner.members == [0, 1]


def test_newcomer_is_handed_the_state_when_its_first_round_does_not_begin(
    start: Start, tmp_path: Path
) -> None:
    zero, one, two = _sites(start, 3)
    ready = threading.Event()

    def comes_back() -> Site:
        one.learner.join()
        one.step(1, [1.0, 2.0, 3.0])
        one.close()
        shutil.rmtree(tmp_path / "1")
        ready.wait(20)
        back = start(1, 3)
        back.learner.join()
        back.step(3, [1.0, 2.0, 3.0])
        return back

    def dying() -> None:
        two.learner.join()
        two.step(1, [1.0, 2.0, 3.0])
        two.step(2, [1.0, 2.0, 3.0])
        _dies_before_it_connects(two, zero.meeting._next)

    def goes_on() -> None:
        zero.step(1, [1.0, 2.0, 3.0])
        zero.step(2, [1.0, 2.0, 3.0])
        ready.set()
        while not zero.meeting._newcomer(1):
            time.sleep(0.01)
        zero.step(3, [1.0, 2.0, 3.0])

    _, back, _ = _together(goes_on, comes_back, dying)
    assert zero.learner.members == [0, 1]
    assert back.toy.taken == [(3, [2.0])]
    assert torch.equal(zero.toy.w, back.toy.w)


def _without_the_line_of_1_and_2(meeting: Meeting) -> Callable[[int, list[int]], Any]:
    """Return a link function that fails when sites 1 and 2 meet, as if gloo had timed out."""
    link = meeting._link
    return lambda number, members: None if {1, 2} <= set(members) else link(number, members)


def test_one_of_two_sites_that_cannot_reach_each_other_is_left_out(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one, two = sites = _sites(start, 3)
    for site in sites:
        monkeypatch.setattr(site.meeting, "_link", _without_the_line_of_1_and_2(site.meeting))

    def trains() -> None:
        one.learner.join()
        one.step(1, [1.0, 2.0])

    def is_left_out() -> None:
        with pytest.raises(SiteLost, match="went on without site 2"):
            two.learner.join()

    _together(lambda: zero.step(1, [1.0, 2.0]), trains, is_left_out)
    assert zero.learner.members == one.learner.members == [0, 1]
    assert torch.equal(zero.toy.w, one.toy.w)


def test_site_that_does_not_connect_says_which_interface_it_may_need(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = MeetingPlace(0, "127.0.0.1", port, alive_s=0.5, wait_s=10.0)
    zero = Meeting(place, expected=2, secret=SECRET)
    # Gloo obeys the variable: it finds no such interface.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    assert zero._link(0, [0, 1]) is None
    zero.close()
    (record,) = [each for each in caplog.records if each.msg == "not connected to all sites"]
    assert "none-such" in record.__dict__["error"]
    assert "GLOO_SOCKET_IFNAME" in record.__dict__["hint"]


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, set[frozenset[int]]]:
    """Return a number of sites, and the pairs of them that cannot reach each other."""
    count = draw(st.integers(1, 6))
    pairs = [frozenset(pair) for pair in combinations(range(count), 2)]
    return count, draw(st.sets(st.sampled_from(pairs))) if pairs else set()


def _rounds(roll: Roll, cut: set[frozenset[int]], deaths: Iterator[set[int]]) -> int:
    """Return the number of rounds until all on a roll are connected; at most 20."""
    dead: set[int] = set()
    for number in range(1, 21):
        dead |= next(deaths) - {0}
        pairs = {frozenset(pair) for pair in combinations(roll.called, 2)}
        silent = dead & {*roll.called}
        linked = not silent and not pairs & cut
        if linked and not roll.waiting:
            return number
        roll.call_next(linked=linked, silent=silent)
    raise AssertionError("no round began")


@given(networks())
def test_roll_leaves_nobody_out_whom_all_others_reach(
    network: tuple[int, set[frozenset[int]]],
) -> None:
    count, cut = network
    roll = Roll([*range(count)])
    assert _rounds(roll, cut, repeat(set())) <= 2 * count
    for refused in {*range(count)} - {*roll.called}:
        assert any(frozenset({refused, site}) in cut for site in roll.called)


@given(networks(), st.lists(st.sets(st.integers(1, 5)), max_size=10))
def test_roll_has_an_end_whoever_dies(
    network: tuple[int, set[frozenset[int]]], deaths: list[set[int]]
) -> None:
    count, cut = network
    assert _rounds(Roll([*range(count)]), cut, chain(deaths, repeat(set()))) <= 2 * count


def test_message_is_waited_for_longer_than_a_connection(port: int) -> None:
    def site(number: int) -> Meeting:
        place = MeetingPlace(number, "127.0.0.1", port, alive_s=0.5, wait_s=10.0)
        return Meeting(place, expected=2, secret=SECRET)

    zero, one = _together(lambda: site(0), lambda: site(1))
    first, second = _together(zero.gather, lambda: one.ask({}))

    def late() -> None:
        time.sleep(2 * zero._place.alive_s)
        second.send_all(b"late", 0)

    received, _ = _together(lambda: first.receive_all(1, limit=4), late)
    assert received == b"late"
    zero.close()
    one.close()


def test_store_forgets_rounds(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "REMEMBERED_ROUNDS", 2)
    zero, one = _sites(start)
    steps = range(1, 6)
    _together(
        lambda: [zero.step(n, [1.0, 2.0]) for n in steps],
        lambda: [one.learner.join(), *(one.step(n, [1.0, 2.0]) for n in steps)],
    )
    kinds = ("here/", "members/", "linked/", "links/", "done/", "commit/")
    own = [key for key in zero.meeting._store.list_keys() if key.startswith(kinds)]
    # The last round's number is 4.
    assert {int(key.split("/")[1]) for key in own} == {2, 3, 4}


# ------------------------------------------------------------------------ a site that is late


def _three(port: int) -> tuple[Meeting, Meeting, Meeting, list[Round]]:
    """Return the meetings of three sites and their first round.

    Site 1's deadline is a tenth of site 0's, as if it had come so much earlier.
    """

    def site(number: int) -> Meeting:
        place = MeetingPlace(
            number, "127.0.0.1", port, alive_s=0.5, wait_s=0.1 if number == 1 else 1.0
        )
        return Meeting(place, expected=3, secret=SECRET)

    # Site 1 does not wait for the store, because its deadline is short.
    zero = site(0)
    one, two = site(1), site(2)
    rounds = _together(zero.gather, lambda: one.ask({}), lambda: two.ask({}))
    return zero, one, two, rounds


def _closed(*meetings: Meeting) -> None:
    for each in meetings:
        each.close()


def test_site_that_came_early_waits_until_site_0_leaves_the_late_one_out(port: int) -> None:
    """Site 2 lives and does nothing."""
    zero, one, two, _ = _three(port)
    rounds = _together(one.gather, zero.gather)
    assert [each.members for each in rounds] == [[0, 1], [0, 1]]
    _closed(zero, one, two)


def test_site_that_answered_early_waits_for_site_0_s_decision(port: int) -> None:
    zero, one, two, (first, second, _) = _three(port)
    agreed = _together(
        lambda: one.agree(second, trained_on="A"), lambda: zero.agree(first, trained_on="A")
    )
    assert agreed == [False, False]
    _closed(zero, one, two)


def test_site_gives_up_on_a_site_0_that_gives_no_sign_of_life(port: int) -> None:
    zero, one, two, _ = _three(port)
    zero.close()
    with pytest.raises(SiteLost, match=r"site 0 to begin the round failed: .* for 0\.5 s"):
        one.gather()
    _closed(one, two)


def test_site_that_slept_through_rounds_that_are_forgotten_is_told(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "REMEMBERED_ROUNDS", 1)
    zero, one = _sites(start)

    def sleeper() -> None:
        one.learner.join()
        one.step(1, [1.0, 2.0])
        one.meeting.close()
        left.wait(20)
        with pytest.raises(SiteLost, match="went on without site 1"):
            one.step(2, [1.0, 2.0])

    left = threading.Event()
    _together(lambda: [*(zero.step(n, [1.0, 2.0]) for n in range(1, 6)), left.set()], sleeper)


# --------------------------------------------------------------------------------- coming back


def _comes_back(start: Start, folder: Path, *, forgets: bool) -> tuple[Site, Site]:
    """Return two sites after three steps; the second one missed a step and is back."""
    zero, one = _sites(start)
    ready = threading.Event()

    def comes_back() -> Site:
        one.learner.join()
        one.step(1, [1.0, 2.0])
        one.close()
        ready.wait(20)
        if forgets:
            shutil.rmtree(folder / "1")
        back = start(1)
        back.shelf.held = {} if forgets else one.shelf.held
        back.learner.join()
        saved = back.checkpoints.newest()
        assert saved is not None
        assert (saved.state.version, saved.state.kept) == (2, {"pools": 2})
        assert sorted(back.shelf.held) == [1, 2]
        back.step(3, [1.0, 2.0])
        return back

    def goes_on() -> None:
        zero.step(1, [1.0, 2.0])
        zero.step(2, [1.0, 2.0])
        ready.set()
        while not zero.meeting._newcomer(1):
            pass
        zero.step(3, [1.0, 2.0])

    _, back = _together(goes_on, comes_back)
    return zero, back


@pytest.mark.parametrize("forgets", [False, True])
def test_site_that_comes_back_holds_the_run_s_state(
    start: Start, tmp_path: Path, forgets: bool
) -> None:
    zero, back = _comes_back(start, tmp_path, forgets=forgets)
    assert torch.equal(zero.toy.w, back.toy.w)
    assert torch.equal(zero.learner._outer.velocity["w"], back.learner._outer.velocity["w"])
    for version in (1, 2, 3):
        assert torch.equal(zero.shelf.held[version]["w"], back.shelf.held[version]["w"])
    # Moments are a site's own: it goes on with its earlier ones.
    assert back.toy.momentum.any()


def test_site_that_missed_a_step_is_sent_that_step_alone(start: Start, tmp_path: Path) -> None:
    zero, back = _comes_back(start, tmp_path, forgets=False)
    messages = 8 + byte_size(2 * BLOCK) + 4 * MARK_BYTES + 8
    assert messages < zero.learner.heal_bytes < messages + 1000
    assert back.learner._history.since(PolicyVersion(1), "") is None
    assert len(back.learner._history._steps) == 2


# ----------------------------------------------------------------------------------- history


def _mean(byte: int, size: int = 300) -> Mean:
    return Mean([torch.full((size,), byte, dtype=torch.uint8)])


def test_history_has_what_was_moved_since_a_state() -> None:
    history = OuterHistory()
    for version in (4, 5, 6):
        digest = f"state of {version - 1}"
        history.add(PolicyVersion(version), digest, _mean(version), most_bytes=1000)
    found = history.since(PolicyVersion(4), "state of 4")
    assert found is not None
    assert [int(mean.parts[0][0]) for mean in found] == [5, 6]


@pytest.mark.parametrize(("version", "digest"), [(4, "another"), (2, "state of 2"), (6, "")])
def test_history_does_not_know_another_state(version: int, digest: str) -> None:
    history = OuterHistory()
    for made in (4, 5, 6):
        state = f"state of {made - 1}"
        history.add(PolicyVersion(made), state, _mean(made), most_bytes=1000)
    assert history.since(PolicyVersion(version), digest) is None


def test_history_is_no_larger_than_the_state() -> None:
    history = OuterHistory()
    for version in range(1, 9):
        history.add(PolicyVersion(version), str(version), _mean(version), most_bytes=1000)
    assert history.since(PolicyVersion(4), "5") is None
    assert len(history.since(PolicyVersion(5), "6") or []) == 3


def test_history_begins_again_where_versions_are_missing() -> None:
    history = OuterHistory()
    history.add(PolicyVersion(1), "0", _mean(1), most_bytes=1000)
    history.add(PolicyVersion(3), "2", _mean(3), most_bytes=1000)
    assert history.since(PolicyVersion(0), "0") is None
    assert len(history.since(PolicyVersion(2), "2") or []) == 1


# --------------------------------------------------------------------------------- strangers


@given(st.binary(max_size=50), st.sampled_from(["", "a", "round/1/2", "ü"]))
def test_sealed_message_opens_at_its_place(message: bytes, place: str) -> None:
    seal = Seal(SECRET)
    assert seal.open(place, seal.close(place, message)) == message


@given(st.binary(max_size=50), st.integers(0, 10**6))
def test_message_that_was_changed_does_not_open(message: bytes, at: int) -> None:
    seal = Seal(SECRET)
    closed = bytearray(seal.close("round/1", message))
    assert seal.open("round/2", bytes(closed)) is None
    assert Seal(bytes(32)).open("round/1", bytes(closed)) is None
    assert seal.open("round/1", bytes(closed)[1:]) is None
    closed[at % len(closed)] ^= 1
    assert seal.open("round/1", bytes(closed)) is None


def test_place_and_message_cannot_be_shifted() -> None:
    seal = Seal(SECRET)
    assert seal.mark("ab", b"c") != seal.mark("a", b"bc")


def test_secret_is_one_run_s() -> None:
    secrets = {site_secret(b"k" * 32, RunId(run), chain) for run in (1, 2) for chain in (1, 2)}
    assert len(secrets | {site_secret(b"l" * 32, RunId(1), 1)}) == 5


def test_store_listens_at_the_address_of_site_0_alone(start: Start, port: int) -> None:
    start(0)
    socket.create_connection(("127.0.0.1", port), 5).close()
    with pytest.raises(OSError):  # noqa: PT011  # a platform may lack the second address
        socket.create_connection(("127.0.0.2", port), 5)


def test_store_at_a_name_listens_at_all_addresses_and_says_so(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    place = MeetingPlace(0, "localhost", port, alive_s=0.5, wait_s=10.0)
    Meeting(place, expected=2, secret=SECRET).close()
    assert "site 0 listens at all addresses of this machine" in caplog.messages


def test_store_at_another_machine_s_address_is_refused(port: int) -> None:
    place = MeetingPlace(0, "192.0.2.1", port, alive_s=0.5, wait_s=10.0)
    with pytest.raises(SiteLost, match=r"cannot listen at 192\.0\.2\.1") as caught:
        Meeting(place, expected=2, secret=SECRET)
    assert "--site-address" in (caught.value.hint or "")


def test_site_without_the_key_is_not_let_in(start: Start, port: int) -> None:
    place = MeetingPlace(1, "127.0.0.1", port, alive_s=0.3, wait_s=1.0)

    def stranger() -> None:
        with pytest.raises(SiteLost, match="site 0 to open the store"):
            Meeting(place, expected=2, secret=bytes(32))

    _together(lambda: start(0), stranger)


def test_values_of_a_stranger_are_passed_over(start: Start) -> None:
    zero, one = _sites(start)
    session, ticket = zero.meeting._session, json.dumps({"ticket": "x", "knows": {}}).encode()
    forged = Seal(bytes(32)).close(f"{session}/join/1", ticket)
    for value in (b"", ticket, forged, b"x" * (1 << 17)):
        zero.meeting._store.set("join/1", value)
        assert zero.meeting._newcomer(1) is None
        zero.meeting._store.set("here/0/1", value)
        assert zero.meeting._peek("here/0/1") is None
    one.meeting._set("join/1", {"ticket": "x", "knows": {}})
    assert zero.meeting._newcomer(1) is not None


def test_beat_that_is_shown_again_is_no_sign_of_life(start: Start) -> None:
    zero, one = _sites(start)
    one.meeting._stopped.set()
    key = f"beat/{one.meeting._ticket}"
    one.meeting._set(key, 1000)
    shown = zero.meeting._store.get(key)
    assert not zero.meeting._is_silent(one.meeting._ticket)
    until = time.monotonic() + 5
    while not zero.meeting._is_silent(one.meeting._ticket):
        zero.meeting._store.set(key, shown)
        assert time.monotonic() < until


def test_site_that_starts_again_is_alive_however_long_its_last_life_was(start: Start) -> None:
    zero, one = _sites(start)
    one.meeting._stopped.set()
    one.meeting._set(f"beat/{one.meeting._ticket}", 10**6)
    one.meeting._set("join/1", {"ticket": one.meeting._ticket, "knows": {}})
    assert zero.meeting._newcomer(1) is not None
    again = start(1)
    again.meeting._set("join/1", {"ticket": again.meeting._ticket, "knows": {}})
    assert zero.meeting._newcomer(1) is not None


class Line:
    """Messages between two members, as bytes that a stranger may change on the way."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def send(self, tensors: list[Tensor], _to: int, _tag: int) -> Any:
        self.sent.append(tensors[0].clone())
        return self

    def recv(self, tensors: list[Tensor], _sender: int, _tag: int) -> Any:
        tensors[0].copy_(self.sent.pop(0))
        return self

    def wait(self, _timeout: timedelta) -> None:
        """End."""


def _ends() -> tuple[Line, Round, Round]:
    line, seal = Line(), Seal(SECRET)
    zero, one = (Round(3, [0, 1], [], line, MeetingPlace(i, "", 0), seal.mark) for i in (0, 1))
    return line, zero, one


def test_messages_arrive_in_order() -> None:
    _, zero, one = _ends()
    for message in (b"first", b"", b"third"):
        zero.send_all(message, 1)
        assert one.receive_all(0, limit=5) == message


@pytest.mark.parametrize("trick", ["changed", "repeated", "of another round"])
def test_message_that_is_not_the_member_s_is_refused(trick: str) -> None:
    line, zero, one = _ends()
    zero.start_send(torch.arange(9, dtype=torch.uint8), 1)
    if trick == "changed":
        line.sent[0][4] += 1
    if trick == "repeated":
        line.sent.append(line.sent[0].clone())
        one.receive(9, 0)
    if trick == "of another round":
        one = Round(4, [0, 1], [], line, MeetingPlace(1, "", 0), Seal(SECRET).mark)
    with pytest.raises(SiteLost, match="from site 0 is not authentic"):
        one.receive(9, 0)


def test_message_above_the_limit_is_not_read() -> None:
    _, zero, one = _ends()
    zero.send_all(bytes(100), 1)
    with pytest.raises(SiteLost, match="100 bytes, the limit is 99"):
        one.receive_all(0, limit=99)


def test_site_that_the_run_left_behind_is_told(start: Start) -> None:
    zero, one = _sites(start)

    def sleeper() -> None:
        one.learner.join()
        one.step(1, [1.0, 2.0])
        one.meeting.close()
        left.wait(20)
        with pytest.raises(SiteLost, match="went on without site 1"):
            one.step(2, [1.0, 2.0])

    left = threading.Event()
    _together(lambda: [zero.step(1, [1.0, 2.0]), zero.step(2, [1.0, 2.0]), left.set()], sleeper)


def test_wait_for_a_site_that_never_comes_has_an_end(port: int) -> None:
    place = MeetingPlace(1, "127.0.0.1", port, alive_s=0.2, wait_s=0.5)
    with pytest.raises(SiteLost, match="site 0's store"):
        Meeting(place, expected=2, secret=SECRET)
