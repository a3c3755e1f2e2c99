"""Calls that share an engine: the order of samples, each call's results, and isolation."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from muster.inference.decode_loop import Call, Decode
from muster.inference.engine import Progress, Request, Room
from muster.inference.lean_rows import LeanRows
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.errors import EngineError
from muster.protocol.recipe import ProofRecipe

PROOF = ProofRecipe(chunk_tokens=4, topk=8)
LENGTH = 48


def drawn(limits: Sequence[int], first_seed: int, temperature: float = 1.0) -> list[Request]:
    """Return requests of some prompts that end at these limits at the latest."""
    return [
        Request((3 + i % 3, 4), first_seed + i, temperature, limit)
        for i, limit in enumerate(limits)
    ]


LONG = drawn([40] * 9, 300, temperature=50.0)
"""At this temperature all tokens are about as likely, so some samples get long."""


@pytest.fixture
def decode(engine: TransformersEngine) -> Iterator[Decode]:
    decode = Decode(
        engine._rows_for(8, LENGTH),
        LENGTH,
        np.zeros(engine.vocab_size, bool),
        PROOF,
        torch.device("cpu"),
        is_wide=False,
    )
    yield decode
    decode.close()


def begun(call: Call) -> int:
    return len(call.samples) - len(call.waiting)


@torch.inference_mode()
def test_a_row_that_a_call_leaves_is_the_next_calls(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, rows = decode.rows.step, []

    def counted(tokens: Any) -> Any:
        rows.append(len(tokens))
        return own(tokens)

    monkeypatch.setattr(decode.rows, "step", counted)
    first = decode.begin(drawn([5, 9, 13, 17, 21, 25], 0), 1)
    second = decode.begin(drawn([30] * 6, 100), 2)
    while not first.is_over:
        decode.step()
        assert not first.waiting
    # Six rows, as many as a call has samples, while samples wait. When the last row of the first
    # call ends, the five others belong to the second call.
    assert rows == [6] * 24
    assert begun(second) == 5


@torch.inference_mode()
def test_an_accelerator_fills_all_its_rows(decode: Decode) -> None:
    decode.is_wide = True
    calls = [decode.begin(drawn([40] * 6, 100 * i), i) for i in range(2)]
    decode.step()
    assert [begun(call) for call in calls] == [6, 2]


@torch.inference_mode()
@pytest.mark.parametrize("due", [(1, 2), (2, 1)])
def test_what_is_due_first_is_begun_first(decode: Decode, due: tuple[int, int]) -> None:
    calls = [decode.begin(drawn([40] * 12, 100 * i), each) for i, each in enumerate(due)]
    decode.step()
    found = [begun(call) for call in calls]
    assert found == ([8, 0] if due == (1, 2) else [0, 8])


@torch.inference_mode()
def test_a_call_that_is_given_up_leaves_its_rows_and_numbers(decode: Decode) -> None:
    alone = [c.tokens for c in finished(decode, drawn([20] * 4, 100))]
    for _ in range(3):
        first = decode.begin(drawn([40] * 8, 0), 1)
        second = decode.begin(drawn([20] * 4, 100), 2)
        decode.step()
        decode.step()
        decode.leave(first)
        while not second.is_over:
            decode.step()
        assert [c.tokens for c in decode.finish(second)] == alone
        decode.leave(second)
        assert not decode.calls
    assert max(*first.samples, *second.samples) == 11


def finished(decode: Decode, asked: Sequence[Request]) -> list[Any]:
    call = decode.begin(asked, 0)
    while not call.is_over:
        decode.step()
    made = decode.finish(call)
    decode.leave(call)
    return made


def at_the_same_time(
    engine: TransformersEngine, asked: Sequence[Sequence[Request]], watches: Sequence[Any] = ()
) -> list[Any]:
    """Return what each call returns, or raises."""
    with ThreadPoolExecutor(len(asked)) as pool:
        made = [
            pool.submit(engine.generate, each, proof=PROOF, watch=watch)
            for each, watch in zip(asked, watches or [None] * len(asked), strict=True)
        ]
        return [each.exception() or each.result() for each in made]


CALLS = [drawn([40, 3, 17, 9, 33, 28], 0), drawn([12] * 9, 100), drawn([1, 40], 200)]


@pytest.mark.parametrize("lean", [True, False])
def test_calls_at_the_same_time_give_what_each_gives_alone(
    engine: TransformersEngine, lean: bool
) -> None:
    engine.lean = lean
    alone = [engine.generate(asked, proof=PROOF) for asked in CALLS]
    for room in (Room(), Room(context=LENGTH)):
        engine._room = room
        made = at_the_same_time(engine, CALLS)
        for calls in zip(made, alone, strict=True):
            both = [[c.tokens for c in call] for call in calls]
            assert both[0] == both[1]
        assert not engine._decodes


def test_calls_share_the_rows_of_an_engine_with_room(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine._room, made = Room(context=LENGTH), []
    own = LeanRows.__init__

    def counted(self: LeanRows, *given: Any) -> None:
        made.append(given[1:3])
        own(self, *given)

    monkeypatch.setattr(LeanRows, "__init__", counted)

    def join(_: Progress) -> None:
        if not beside:
            beside.append(pool.submit(engine.generate, CALLS[1], proof=PROOF, watch=None))
            assert joined.wait(5)

    joined, begin = threading.Event(), Decode.begin

    def note(self: Decode, *given: Any) -> Call:
        call = begin(self, *given)
        if len(self.calls) == 2:
            joined.set()
        return call

    monkeypatch.setattr(Decode, "begin", note)

    with ThreadPoolExecutor(1) as pool:
        beside: list[Any] = []
        engine.generate(LONG, proof=PROOF, watch=join)
        assert [len(each.tokens) <= 12 for each in beside[0].result()] == [True] * 9
    assert made == [(256, LENGTH)]


def test_what_ends_one_call_leaves_the_other_its_own(engine: TransformersEngine) -> None:
    class Enough(Exception):
        pass

    def stop(_: Progress) -> None:
        raise Enough

    engine._room = Room(context=LENGTH)
    # Four samples end at once, so that the other call's rows come after those that are given up.
    first, other = drawn([2] * 4 + [40] * 5, 300, temperature=50.0), LONG
    alone = [c.tokens for c in engine.generate(other, proof=PROOF)]
    stopped, made = at_the_same_time(engine, [first, other], [stop, None])
    assert isinstance(stopped, Enough)
    assert [c.tokens for c in made] == alone
    assert not engine._decodes


def test_a_failure_is_every_calls_and_the_next_one_is_none_the_worse(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine._room, own = Room(context=LENGTH), LeanRows.step

    def fail(self: LeanRows, tokens: Any) -> Any:
        if len(engine._decodes[0].calls) == 2:
            raise RuntimeError("out of memory")
        return own(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(LeanRows, "step", fail)
        found = at_the_same_time(engine, [LONG, LONG])
    assert [isinstance(each, EngineError) for each in found] == [True, True]
    assert not engine._decodes
    assert len(engine.generate(CALLS[0], proof=PROOF)) == 6
