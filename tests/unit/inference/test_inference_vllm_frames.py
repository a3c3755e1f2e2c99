"""Messages between the vLLM engine and its process round-trip, and bad ones are refused."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import vllm_double
from hypothesis import given, strategies as st

from muster.inference.engine import Completion, Redraw, Request, Sample, Share
from muster.inference.vllm import frames
from muster.inference.vllm.frames import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    Channel,
    ChannelBroken,
    ChannelClosed,
    ChannelSilent,
    Frame,
)
from muster.protocol.ids import Hash32
from muster.protocol.recipe import ProofRecipe

PROOF = ProofRecipe()
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9).map(tuple)
REQUESTS = st.lists(
    st.builds(
        Request,
        st.sampled_from([(1,), (2, 3), (4, 5, 6)]),
        st.integers(0, 2**64 - 1),
        st.floats(0.1, 2.0),
        st.integers(1, 99),
        st.integers(0, 99),
    ),
    min_size=1,
)
SEEDS = st.integers(0, 2**64 - 1)
SHARES = st.builds(
    Share, st.binary(min_size=32, max_size=32).map(Hash32), st.integers(0, 99), st.integers(1, 99)
)


@st.composite
def sample(draw: st.DrawFn) -> Sample:
    tokens = draw(TOKENS)
    others = st.lists(st.integers(0, 2**31 - 1), min_size=len(tokens), max_size=len(tokens)).map(
        tuple
    )
    return Sample(
        draw(TOKENS),
        tokens,
        draw(SEEDS),
        draw(st.lists(st.binary(max_size=9))),
        tuple(draw(st.lists(SHARES, max_size=3))),
        tuple(draw(st.lists(st.builds(Redraw, SEEDS, others), max_size=3))),
    )


SAMPLES = sample()
Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_frame_arrives_as_it_was_sent(ends: Ends) -> None:
    channel, theirs = ends
    frame = Frame({"kind": "rows", "text": "ä"}, b"\0\xff" * 5000)
    Channel(theirs).send(frame)
    assert channel.receive() == frame


def message(data: bytes) -> bytes:
    return struct.pack("!i", len(data)) + data


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        (struct.pack("!i", MAX_HEADER_BYTES + 1), "too long"),
        (message(b"{}") + struct.pack("!i", MAX_BODY_BYTES + 1), "too long"),
        (b"\xff" * 64, "too long"),
        (message(b"[]") + message(b""), "not an object"),
        (message(b"{[") + message(b""), "does not parse"),
        (message(b"[" * (1 << 20)) + message(b""), "does not parse"),
        (message(b"\xff") + message(b""), "does not parse"),
    ],
)
def test_what_is_no_frame_is_refused(ends: Ends, sent: bytes, match: str) -> None:
    channel, theirs = ends
    # Sent from a thread: a long frame does not fit into the socket's buffer.
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(theirs.sendall, sent)
        with pytest.raises(ChannelBroken, match=match):
            channel.receive()
        done.result()


@pytest.mark.parametrize("sent", [b"", b"\0", message(b"{}"), message(b"{}") + b"\0\0\0\4ab"])
def test_frame_cut_short_is_noticed(ends: Ends, sent: bytes) -> None:
    channel, theirs = ends
    theirs.sendall(sent)
    theirs.close()
    with pytest.raises(ChannelClosed):
        channel.receive()


def test_nobody_taking_a_frame_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, send_s=0.05)
    with pytest.raises(ChannelSilent):
        channel.send(Frame({}, bytes(1 << 24)))
    theirs.close()
    with pytest.raises(ChannelClosed):
        channel.send(Frame({}, bytes(1 << 24)))
    channel.close()


def test_closing_an_end_wakes_who_receives(ends: Ends) -> None:
    channel, _ = ends
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.receive)
        channel.close()
        with pytest.raises(ChannelClosed):
            waiting.result(5)


def test_frame_too_long_is_not_sent(ends: Ends) -> None:
    with pytest.raises(ValueError, match="too long"):
        ends[0].send(Frame({"text": "a" * MAX_HEADER_BYTES}))


def carried(frame: Frame) -> Frame:
    """The frame after a round trip of its header through JSON."""
    return Frame(json.loads(json.dumps(frame.header)), frame.body)


@given(REQUESTS)
def test_requests_round_trip(requests: list[Request]) -> None:
    assert frames.requests_of(carried(frames.generate_frame(requests, PROOF))) == requests


@given(st.lists(st.tuples(TOKENS, TOKENS)))
def test_pairs_round_trip(pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    assert frames.pairs_of(carried(frames.prove_frame(pairs, PROOF))) == pairs


@given(st.lists(SAMPLES))
def test_samples_round_trip(samples: list[Sample]) -> None:
    frame = carried(frames.examine_frame(samples, PROOF, 0.7))
    assert frames.samples_of(frame) == samples
    assert (frame.header["proof"], frame.header["temperature"]) == (PROOF.model_dump(), 0.7)


@given(st.integers(0, 3), TOKENS, st.lists(st.binary(max_size=9)))
def test_completions_round_trip(place: int, tokens: tuple[int, ...], proofs: list[bytes]) -> None:
    frame = carried(frames.completion_frame(place, Completion(tokens, proofs)))
    assert frames.completion_of(frame, [9] * 4) == (place, Completion(tokens, proofs))


LIES = [
    b'[4,{"tokens":[1],"proofs":[]}]',
    b'[-1,{"tokens":[1],"proofs":[]}]',
    b'[null,{"tokens":[1],"proofs":[]}]',
    b'[3,{"tokens":[],"proofs":[]}]',
    b'[3,{"tokens":[1,1,1,1,1,1,1,1,1,1],"proofs":[]}]',
    b'[3,{"tokens":["a"],"proofs":[]}]',
    b'[3,{"tokens":[1],"proofs":3}]',
    b'[3,{"tokens":[1],"proofs":["?"]}]',
]


@pytest.mark.parametrize("lie", LIES)
def test_completion_that_answers_something_else_is_caught(lie: bytes) -> None:
    with pytest.raises(ChannelBroken):
        frames.completion_of(Frame({"kind": "completion"}, lie), [9] * 4)


@given(SAMPLES, st.integers(0, 3))
def test_findings_round_trip(sample: Sample, place: int) -> None:
    found = vllm_double.found_in(sample)
    frame = carried(frames.examined_frame(place, found))
    got_place, got = frames.examined_of(frame, [sample] * 4)
    assert got_place == place
    assert repr(got) == repr(found)


@pytest.mark.parametrize("lie", [{"place": 4}, {"place": -1}, {"place": None}, {"place": 0}])
def test_findings_of_something_else_are_caught(lie: dict[str, object]) -> None:
    sample = Sample((1,), (2, 3), 4, [b"a"])
    asked = [replace(sample, completion_tokens=(2,)), sample, sample, sample]
    frame = frames.examined_frame(3, vllm_double.found_in(sample))
    assert frames.examined_of(frame, asked)[0] == 3
    with pytest.raises(ChannelBroken):
        frames.examined_of(Frame({**frame.header, **lie}, frame.body), asked)


def test_chunks_that_are_no_numbers_are_caught() -> None:
    sample = Sample((1,), (2, 3), 4, [b"a"])
    frame = frames.examined_frame(0, vllm_double.found_in(sample))
    body = frame.body[:18] + np.full(6, np.nan).tobytes()
    with pytest.raises(ChannelBroken, match="no numbers"):
        frames.examined_of(Frame(frame.header, body), [sample])


@pytest.mark.parametrize(
    "lie", [{"hidden_size": 0}, {"vocab_size": None}, {"eos_token_ids": 3}, {"context": "x"}]
)
def test_facts_that_cannot_be_are_caught(lie: dict[str, object]) -> None:
    shape = frames.PolicyShape(4, 11, frozenset({10}), 64)
    frame = frames.opened_frame(shape, in_place=True)
    assert frames.shape_of(frame) == shape
    with pytest.raises(ChannelBroken):
        frames.shape_of(Frame(frame.header, json.dumps({**json.loads(frame.body), **lie}).encode()))


@given(st.lists(st.integers(1, frames.BATCH_TOKENS * 2)))
def test_parts_cover_all_samples_within_the_bound(counts: list[int]) -> None:
    parts = list(frames.parts(counts))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(counts)))
    for part in parts:
        held = counts[part]
        assert len(held) == 1 or sum(held) <= frames.BATCH_TOKENS
