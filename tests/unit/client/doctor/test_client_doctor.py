"""The doctor: its statistics, the memory that a policy needs, the self-proof."""

import asyncio
import contextlib
import json
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds.chat_world import build_chat_model, make_word_tokenizer
from worlds.client_world import CALIBRATION, RULES, HashEngine, make_ticket

from muster import lifecycle
from muster.api.public_hosts import PrivateNetwork
from muster.client.doctor import State, machine, network
from muster.client.doctor.command import Examination, examine_prompt
from muster.client.doctor.machine import (
    OVERHEAD_BYTES,
    cache_bytes,
    examine_context,
    make_engines,
    memory_needed,
)
from muster.client.doctor.network import examine_chain, examine_run
from muster.client.hardware import find_gpu
from muster.client.validator import soundness
from muster.client.validator.replay import Replay, measure
from muster.client.validator.soundness import prove
from muster.inference.engine import Examined, Room, Sample
from muster.inference.framing import pin_prompt
from muster.protocol.errors import EngineError
from muster.protocol.ids import PolicyVersion
from muster.protocol.messages import Reason
from muster.protocol.recipe import PromptRecipe
from muster.shardcast import Manifest, ManifestFile
from muster.toploc import ChunkResult

CHUNK = ChunkResult(
    exponent_mismatches=0,
    mantissa_error_mean=1.0,
    mantissa_error_median=1.0,
    sign_mismatches=0,
    points=8,
)


class Wrong(HashEngine):
    """Computes another function than the policy, in generation and in prefill alike."""

    def _step(self, tokens: tuple[int, ...]) -> Any:
        return super()._step((*tokens, 1))


def safetensors(path: Path, *, dtype: str = "BF16", count: int = 1000, width: int = 2) -> None:
    header = {"w": {"dtype": dtype, "shape": [count], "data_offsets": [0, count * width]}}
    data = json.dumps(header | {"__metadata__": {"a": "b"}}).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(count * width))


# The self-proof


def test_honest_engine_is_accepted_with_every_statistic_inside_its_limit() -> None:
    engine: Any = HashEngine(PolicyVersion(3))
    found = prove(make_ticket(), RULES, engine, engine)
    assert found.finding is None
    assert all(statistic.passes for statistic in found.statistics)
    assert found.samples == 4
    assert found.units > 0


def test_engine_that_agrees_with_itself_is_caught_by_the_reference() -> None:
    wrong: Any = Wrong(PolicyVersion(3))
    honest: Any = HashEngine(PolicyVersion(3))
    assert prove(make_ticket(), RULES, wrong, wrong).finding is None
    finding = prove(make_ticket(), RULES, wrong, honest).finding
    assert finding is not None
    assert finding.reason is Reason.TOPLOC_MISMATCH


class Slow(HashEngine):
    """Takes a second for each token that it examines."""

    seconds = 0.0
    slowness = 1.0

    def examine(self, samples: Sequence[Sample], **options: Any) -> list[Examined]:
        tokens = sum(len(each.prompt_tokens) + len(each.completion_tokens) for each in samples)
        self.seconds += self.slowness * tokens
        return super().examine(samples, **options)


@pytest.mark.parametrize("slowness", [1e-6, 1.5, 2.0, 1000.0])
def test_slow_reference_examines_as_much_as_there_is_time_for(
    slowness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soundness, "REFERENCE_S", 60.0)
    engine: Any = HashEngine(PolicyVersion(3))
    slow: Any = Slow(PolicyVersion(3))
    slow.slowness = slowness
    found = prove(make_ticket(), RULES, engine, slow, clock=lambda: slow.seconds)
    assert found.finding is None
    # One chunk is always examined.
    assert slow.seconds <= 60 or found.referred == 1
    assert (found.referred == found.samples == 4) == (slowness < 1)


@pytest.mark.parametrize(
    ("dtype", "device", "room", "references"),
    [
        ("float32", "cpu", 1 << 40, 1),
        ("bfloat16", "cpu", 1 << 40, 2),
        ("float32", "cuda", 1 << 40, 2),
        ("bfloat16", "cuda", 1 << 20, 1),
    ],
)
def test_reference_is_float32_on_the_cpu_where_it_fits(
    tmp_path: Path, dtype: str, device: str, room: int, references: int
) -> None:
    safetensors(tmp_path / "model.safetensors")
    made: list[tuple[str, str]] = []

    def load(dtype: str, device: str) -> Any:
        made.append((dtype, device))
        return HashEngine()

    _, _, how = make_engines(load, dtype, device, room_bytes=room, folder=tmp_path)
    assert made == [(dtype, device), ("float32", "cpu")][:references]
    assert how


def test_a_pinned_prompt_is_compared_with_the_policy(tmp_path: Path) -> None:
    build_chat_model(tmp_path / "model", make_word_tokenizer())
    asked = RULES.recipe.model_copy(update={"prompt": PromptRecipe(form="chat")})
    pinned = pin_prompt(asked, tmp_path / "model")
    line = examine_prompt(replace(RULES, recipe=pinned), tmp_path / "model")
    begun = pinned.prompt.template_hash[:10]
    assert (line.state, line.figure) == (State.OK, f"chat, as template {begun} writes it")
    line = examine_prompt(replace(RULES, recipe=asked), tmp_path / "model")
    assert (line.state, line.figure) == (State.FAIL, "the recipe pins no chat template")
    other = make_word_tokenizer()
    other.chat_template += "\n"
    other.save_pretrained(tmp_path / "model")
    line = examine_prompt(replace(RULES, recipe=pinned), tmp_path / "model")
    assert line.state is State.FAIL
    assert "the recipe pins 0x" in line.figure


def test_memory_follows_from_the_header_and_the_number_format(tmp_path: Path) -> None:
    safetensors(tmp_path / "a.safetensors", count=1000)
    safetensors(tmp_path / "b.safetensors", dtype="F32", count=500, width=4)
    assert memory_needed(tmp_path, "float32") - OVERHEAD_BYTES == 1500 * 4
    assert memory_needed(tmp_path, "bfloat16") - OVERHEAD_BYTES == 1500 * 2


def test_a_context_that_does_not_fit_is_said_with_its_size(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    assert cache_bytes(tmp_path, "bfloat16") == 2 * 2 * 2 * 8 * 2
    asked = Examination(1, "rpc", tmp_path, room=Room(context=1000, max_rows=7))
    fits = examine_context(tmp_path, asked, 0)
    assert (fits.state, "7 samples at a time" in fits.figure) == (State.OK, True)
    huge = examine_context(tmp_path, replace(asked, room=Room(context=1 << 40)), 0)
    assert (huge.state, "--memory-share" in huge.advice) == (State.WARN, True)
    (tmp_path / "config.json").write_text("[]")
    assert examine_context(tmp_path, asked, 0).state is State.SKIP


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b'{"w": {"dtype": "F99", "data_offsets": [0, 1]}}']
)
def test_a_malformed_header_is_an_engine_error(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(EngineError, match=r"m\.safetensors is no safetensors file"):
        memory_needed(tmp_path, "float32")


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, bytes(8)])
def test_files_that_say_nothing_need_an_unknown_amount(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    assert memory_needed(tmp_path, "float32") == 0


# Statistics


def worst(replays: list[Replay]) -> dict[str, tuple[float, float, bool]]:
    found = measure(replays, CALIBRATION)
    return {each.name: (each.worst, each.limit, each.passes) for each in found}


def replay(*margins: float, **changes: float) -> Replay:
    chunk: Any = replace(CHUNK, **changes)  # type: ignore[arg-type]
    margins_T = np.array(margins or (0.0,), dtype=np.float32)
    return Replay((chunk,), margins_T, np.zeros(len(margins_T), bool), ((), ()))


def test_the_worst_of_each_statistic_is_shown_beside_its_limit() -> None:
    found = worst([replay(), replay(0.005, 0.002, mantissa_error_mean=3.5)])
    assert found["mantissa error mean"] == (3.5, 4.0, True)
    assert found["exponent mismatches"] == (0.0, 1.0, True)
    assert found["largest margin"][0] == pytest.approx(0.005)
    assert found["tokens outside the margin"] == (0, 0, True)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"exponent_mismatches": 2}, "exponent mismatches"),
        ({"mantissa_error_mean": float("nan")}, "mantissa error mean"),
        ({"mantissa_error_median": 4.5}, "mantissa error median"),
        ({"sign_mismatches": 1}, "sign mismatches"),
        ({"decoy_matches": 17}, "decoy matches"),
        # For half the points the limit is half, rounded down.
        ({"exponent_mismatches": 1, "points": 4}, "exponent mismatches"),
    ],
)
def test_what_fails_a_chunk_fails_its_statistic(changes: dict[str, float], name: str) -> None:
    bad = replay(**changes)
    assert not CALIBRATION.chunk_passes(bad.chunks[0])
    assert not worst([bad])[name][2]


def test_a_margin_outside_fails_with_its_count() -> None:
    bad = replay(0.0, 0.5, float("nan"))
    assert worst([bad])["tokens outside the margin"] == (2, 0, False)


def test_nothing_measured_is_nothing_shown() -> None:
    assert measure([], CALIBRATION) == []


# Machine and network


class FakeNvml(SimpleNamespace):
    """The part of NVML that the doctor uses, for machines without a GPU."""

    def __init__(self, free: tuple[int, ...] = (100 << 30,), *, fails: bool = False) -> None:
        def init() -> None:
            if fails:
                raise RuntimeError("Driver Not Loaded")

        super().__init__(
            nvmlInit=init,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetCount=lambda: len(free),
            nvmlDeviceGetHandleByIndex=lambda number: number,
            nvmlDeviceGetMemoryInfo=lambda n: SimpleNamespace(free=free[n], total=140 << 30),
            nvmlDeviceGetName=lambda _handle: "a GPU",
        )


def gpu(device: str, tmp_path: Path) -> Any:
    lines = list(machine.examine_machine(tmp_path, device, 1))
    return next(line for line in lines if line.name.startswith("gpu"))


def test_a_gpu_is_named_with_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    line = gpu("cpu", tmp_path)
    assert (line.state, line.figure) == (State.OK, "a GPU, 100.0 GiB free of 140.0 GiB")
    assert "--device cuda:0" in line.advice
    assert gpu("cuda", tmp_path).advice == ""


@pytest.mark.parametrize(("device", "state"), [("cpu", State.SKIP), ("cuda:0", State.FAIL)])
def test_a_missing_driver_matters_only_to_who_wants_the_gpu(
    device: str, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(fails=True))
    assert gpu(device, tmp_path).state is state


def test_without_nvml_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu("cpu", tmp_path).state is State.SKIP
    assert "extra `gpu`" in gpu("cuda", tmp_path).advice


def test_more_threads_than_cores_is_a_warning(tmp_path: Path) -> None:
    line = next(machine.examine_machine(tmp_path, "cpu", 10_000))
    assert line.state is State.WARN
    assert "--threads" in line.advice


@pytest.mark.parametrize(
    ("published", "rate", "state"),
    [
        ((0, 500, 510, 520), 0, State.FAIL),
        ((0, 500, 510, 520), 50, State.FAIL),
        ((0, 500, 510, 520), 150, State.WARN),
        ((0, 500, 510, 520), 10_000, State.OK),
        ((0,), 50, State.OK),
        # Blocks' times are whole seconds, so times in one block may differ by a second.
        ((0, 500, 500), 900, State.FAIL),
        ((0, 500, 500), 1100, State.WARN),
        ((0, 500, 500), 10_000, State.OK),
    ],
)
def test_policies_must_arrive_faster_than_they_are_published(
    published: tuple[int, ...], rate: float, state: State
) -> None:
    file = ManifestFile("model.safetensors", 1000, (b"\1" * 32,))  # type: ignore[arg-type]
    manifest = Manifest(1, PolicyVersion(0), (file,), b"\2" * 32, 0, 0)  # type: ignore[arg-type]
    times = {n: SimpleNamespace(timestamp=t) for n, t in enumerate(published)}
    run: Any = SimpleNamespace(checkpoints=times)
    assert network.examine_bandwidth(run, network.Relays(manifest, rate)).state is state


# Chain


class FakeChain:
    """A chain with a given head and a given syncing state."""

    def __init__(self, age_s: float, syncing: object = False) -> None:
        self.chain_id = 1
        self.age_s, self.syncing = age_s, syncing
        self.rpc = self

    async def latest_block(self) -> Any:
        return SimpleNamespace(number=7, timestamp=int(time.time() - self.age_s))

    async def call(self, method: str) -> object:
        assert method == "eth_syncing"
        return self.syncing


@pytest.mark.parametrize(
    ("chain", "state", "says"),
    [
        (FakeChain(2), State.OK, "block 7"),
        (FakeChain(3600), State.WARN, "1 h old"),
        (FakeChain(2, {"currentBlock": "0x1"}), State.FAIL, "block 7"),
    ],
)
async def test_an_endpoint_that_is_behind_is_named(chain: Any, state: State, says: str) -> None:
    line = await examine_chain(chain)
    assert line.state is state
    assert says in line.figure
    assert bool(line.advice) == (state is not State.OK)


@pytest.mark.parametrize(
    ("changes", "state", "says"),
    [
        ({}, State.OK, "open, pays 0.001 per unit"),
        ({"paused": True}, State.FAIL, "paused"),
        ({"closed_at": 5}, State.FAIL, "closed"),
        ({"latest_version": None}, State.FAIL, "no policy yet"),
    ],
)
def test_a_run_that_takes_no_work_makes_unfit(
    changes: dict[str, Any], state: State, says: str
) -> None:
    lines = examine_run(make_run(**changes))
    assert (lines[0].state, says in lines[0].figure) == (state, True)


def test_a_run_without_money_is_a_warning() -> None:
    assert examine_run(make_run(available_wei=0))[1].state is State.WARN


def make_run(**changes: Any) -> Any:
    terms = SimpleNamespace(price_per_unit=10**15, fraud_ppm=1, exact_fraud_ppm=1)
    values: dict[str, Any] = {
        "paused": False,
        "closed_at": 0,
        "latest_version": PolicyVersion(1),
        "available_wei": 10**18,
        "config": SimpleNamespace(terms=terms),
    }
    return SimpleNamespace(**{**values, **changes})


async def test_a_clock_that_is_off_fails_before_requests_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answer(_reader: Any, writer: Any) -> None:
        date = formatdate(time.time(), usegmt=True)
        writer.write(f"HTTP/1.1 200 OK\r\ndate: {date}\r\ncontent-length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert (await network.examine_clock(url)).state is State.OK
        monkeypatch.setattr(network, "SKEW_WARN_S", -1)
        assert (await network.examine_clock(url)).state is State.WARN
        monkeypatch.setattr(network, "SKEW_FAIL_S", -1)
        line = await network.examine_clock(url)
    assert line.state is State.FAIL
    assert "timedatectl" in line.advice


async def test_a_clock_is_read_without_the_body_that_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def flood(_reader: Any, writer: Any) -> None:
        date = formatdate(time.time(), usegmt=True)
        writer.write(f"HTTP/1.1 200 OK\r\ndate: {date}\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()

    monkeypatch.setattr(network, "TIMEOUT_S", 2.0)
    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert (await network.examine_clock(url)).state is State.OK


async def test_a_relay_that_is_down_spoils_nothing_while_another_is_up() -> None:
    server = await asyncio.start_server(lambda _r, w: w.close(), "127.0.0.1", 0)
    async with server:
        up = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        down = "http://127.0.0.1:9"
        assert (await network.examine_ports([up], [up])).state is State.OK
        one_down = await network.examine_ports([up], [up, down])
        assert one_down.state is State.WARN
        assert "no connection to 127.0.0.1:9" in one_down.figure
        assert (await network.examine_ports([up], [down])).state is State.FAIL
        assert (await network.examine_ports([down], [up])).state is State.FAIL


async def test_a_relay_in_our_network_is_not_asked_for_a_stranger() -> None:
    async def refuses(host: str, port: int) -> list[str]:
        assert (host, port) == ("127.0.0.1", place)
        raise PrivateNetwork

    reached: list[str] = []
    server = await asyncio.start_server(lambda _r, _w: reached.append(""), "127.0.0.1", 0)
    async with server:
        place = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{place}"
        assert (await network.examine_ports([], [url], refuses)).state is State.FAIL
        run: Any = SimpleNamespace(
            run_id=1, latest_version=0, checkpoints={0: SimpleNamespace(manifest_root=bytes(32))}
        )
        asked = network.examine_relays([url], run, network.Relays(), refuses)
        assert [line.state async for line in asked] == [State.WARN]
    assert not reached


def test_policies_that_do_not_fit_on_the_disk_are_told_beforehand(tmp_path: Path) -> None:
    assert machine.examine_room(tmp_path / "not" / "there", 1000).state is State.OK
    assert machine.examine_room(tmp_path, 1 << 60).state is State.FAIL


def test_a_model_is_held_against_the_memory_it_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.examine_fit(1, "cpu").state is State.OK
    assert machine.examine_fit(1 << 60, "cpu").state is State.FAIL
    assert machine.examine_fit(1, "cuda").state is State.SKIP
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml((8 << 30,)))
    assert machine.examine_fit(7 << 30, "cuda").state is State.OK
    line = machine.examine_fit(9 << 30, "cuda")
    assert (line.state, "free on cuda" in line.figure) == (State.FAIL, True)
    line = machine.examine_fit(15 << 30, "cuda", tensor_parallel=2)
    assert (line.state, "needed on each of 2" in line.figure) == (State.OK, True)
    assert machine.examine_fit(17 << 30, "cuda", tensor_parallel=2).state is State.FAIL


def test_a_device_without_a_number_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml((10, 20)))
    found = [find_gpu(device) for device in ("cuda", "cuda:1", "cuda:7", "cuda:x", "cuda:-1")]
    assert [each and each.free_bytes for each in found] == [10, 20, None, None, None]


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, None, None),
        ({"memory.max": "max\n", "memory.current": "5\n"}, None, None),
        ({"memory.max": "1000\n", "memory.current": "400\n"}, 1000, 600),
        ({"memory.max": "1000\n", "memory.current": "1400\n"}, 1000, 0),
        (
            {"memory/memory.limit_in_bytes": "900\n", "memory/memory.usage_in_bytes": "100\n"},
            900,
            800,
        ),
    ],
)
def test_memory_is_what_a_container_leaves_of_it(
    tmp_path: Path, files: dict[str, str], total: int | None, available: int | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    if total is None:
        assert lifecycle.total_memory_bytes(tmp_path) > 1 << 28
        assert lifecycle.available_memory_bytes(tmp_path) > 1 << 24
    else:
        assert lifecycle.total_memory_bytes(tmp_path) == total
        assert lifecycle.available_memory_bytes(tmp_path) == available
