"""A published version with NaN in its weights: nobody is accused, other versions are judged, and a
worker says so once."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from worlds.client_chain import FakeFetcher
from worlds.client_desk import Desk, run_until
from worlds.client_world import (
    RUN,
    VERSION,
    HashEngine,
    make_entry,
    make_rollouts,
    make_submission,
    make_ticket,
)
from worlds.validator_bench import ACCEPTED, Bench

from muster.client import finite_policies
from muster.client.validator.soundness import Flaw, Soundness
from muster.inference.examining import Recomputed
from muster.protocol.encoding import keccak
from muster.protocol.errors import EngineError, PolicyBroken, ValidatorDisturbed
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import Reason, Verdict
from muster.protocol.rollouts import encode_rollouts
from muster.shardcast.delta_layout import require_finite

BAD, BAD_ROOT = PolicyVersion(VERSION + 1), keccak(b"the broken policy")
REJECTED = (Verdict.REJECTED, Reason.TOPLOC_MISMATCH)
NAN = np.uint16(0x7FC0)


class Nonsense(HashEngine):
    """An engine whose version BAD has NaN: in the hidden states, in the logits only, or in none of
    what it computes (None)."""

    in_hidden: bool | None = True

    @property
    def is_bad(self) -> bool:
        return self.policy_version == BAD and self.in_hidden is not None

    def generate(self, requests: Any, **options: Any) -> Any:
        if self.is_bad and self.in_hidden:
            raise EngineError("the policy computes nonsense: hidden states hold NaN or infinity")
        return super().generate(requests, **options)

    def recompute(self, samples: Sequence[Any]) -> list[Recomputed]:
        found = super().recompute(samples)
        if not self.is_bad:
            return found
        if self.in_hidden:
            return [Recomputed(np.full_like(p.hidden_TH, NAN), p.logits_TV) for p in found]
        return [Recomputed(p.hidden_TH, p.logits_TV * np.float32("nan")) for p in found]


class Folders(FakeFetcher):
    """Delivers folders with weights; those of BAD hold `number`."""

    def __init__(self, folder: Path, number: float) -> None:
        super().__init__()
        self.folder, self.number = folder, number

    async def fetch(self, run_id: RunId, version: PolicyVersion, root: Hash32) -> Path:
        await super().fetch(run_id, version, root)
        folder = self.folder / str(version)
        folder.mkdir(exist_ok=True)
        weight = torch.ones(8)
        weight[5] = self.number if version == BAD else 1.0
        save_file({"a": torch.ones(2), "norm": weight}, folder / "model.safetensors")
        return folder


def publish_broken(view: Any) -> None:
    run = view.runs[RUN]
    newest = vars(run.checkpoints[VERSION]) | {"version": BAD, "manifest_root": BAD_ROOT}
    run.checkpoints[BAD] = SimpleNamespace(**newest)
    run.latest_version = BAD


def work_of(version: PolicyVersion, index: int) -> Any:
    root = {"policy_root": BAD_ROOT} if version == BAD else {}
    ticket = make_ticket(index=index, policy_version=version, **root)
    rows = make_rollouts(ticket, version)
    return make_entry(ticket, make_submission(ticket, rows)), encode_rollouts(rows)


class Watched(Bench):
    """A validator with soundness checks; `alarms` are the flaws that paused slashing."""

    def __init__(
        self, state: Path, number: float = math.nan, *, in_hidden: bool | None = True
    ) -> None:
        super().__init__(state)
        self.alarms: list[Flaw] = []
        engine = Nonsense()
        engine.in_hidden = in_hidden
        self.change(engine=engine, fetcher=Folders(state, number))
        publish_broken(self.view)

        async def alarm(flaw: Flaw) -> None:
            self.alarms.append(flaw)

        self.loop.soundness = Soundness(self.loop.find_flaw, alarm, clock=lambda: self.seconds)

    async def validate(self, batch_id: int, *versions: PolicyVersion) -> list[Any]:
        made = [work_of(v, 10 * batch_id + i) for i, v in enumerate(versions)]
        await self.loop.validate(self.commit(batch_id, [e for e, _ in made], *[d for _, d in made]))
        return [(r.verdict, r.reason) for r in self.posted()]


@pytest.fixture(params=[True, False, None], ids=["hidden states", "logits", "nowhere"])
async def bench(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Watched]:
    opened = Watched(tmp_path, in_hidden=request.param)
    yield opened
    opened.close()


async def test_work_of_a_broken_version_is_rejected_and_other_work_is_judged(
    bench: Watched,
) -> None:
    assert await bench.validate(1, BAD, VERSION) == [REJECTED, ACCEPTED]
    bench.seconds += 10_000
    assert await bench.validate(2, VERSION, BAD) == [ACCEPTED, REJECTED]
    assert await bench.validate(3, BAD) == [REJECTED]
    bench.seconds += 10_000
    assert await bench.validate(4, VERSION) == [ACCEPTED]
    assert bench.alarms == []


async def test_machine_that_computes_nonsense_judges_nobody(tmp_path: Path) -> None:
    """Its policy's weights are finite, so the machine may be at fault."""
    bench = Watched(tmp_path, number=1.0)
    with pytest.raises(EngineError):
        await bench.validate(1, BAD)
    assert bench.orchestrator.outcomes == []
    assert await bench.validate(2, VERSION) == [ACCEPTED]
    bench.close()


async def test_machine_that_computes_nonsense_logits_judges_nobody(tmp_path: Path) -> None:
    bench = Watched(tmp_path, number=1.0, in_hidden=False)
    with pytest.raises(ValidatorDisturbed):
        await bench.validate(1, BAD)
    assert bench.orchestrator.outcomes == []
    assert await bench.validate(2, VERSION) == [ACCEPTED]
    bench.close()


async def test_work_is_accepted_where_the_same_engine_has_finite_weights(tmp_path: Path) -> None:
    bench = Watched(tmp_path, number=1.0, in_hidden=None)
    assert await bench.validate(1, BAD) == [ACCEPTED]
    bench.close()


async def test_weights_of_a_version_are_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PolicyVersion] = []

    def look(folder: Path, version: PolicyVersion) -> None:
        seen.append(version)
        require_finite(folder, version)

    monkeypatch.setattr(finite_policies, "require_finite", look)
    bench = Watched(tmp_path)
    for batch_id in (1, 2):
        assert await bench.validate(batch_id, BAD, VERSION) == [REJECTED, ACCEPTED]
        bench.seconds += 10_000
    assert sorted(seen) == [VERSION, BAD]
    bench.close()


async def test_slow_look_at_one_version_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, disk = list[PolicyVersion](), threading.Event()

    def look(_folder: Path, version: PolicyVersion) -> None:
        seen.append(version)
        assert version != BAD or disk.wait(60)

    monkeypatch.setattr(finite_policies, "require_finite", look)
    policies = finite_policies.FinitePolicies()
    slow = [asyncio.ensure_future(policies.require(BAD_ROOT, BAD, tmp_path)) for _ in range(2)]
    async with asyncio.timeout(30):
        while not seen:
            await asyncio.sleep(0)
        await policies.require(keccak(b"the version before"), VERSION, tmp_path)
    disk.set()
    await asyncio.gather(*slow)
    assert seen == [BAD, VERSION]


@pytest.mark.parametrize("in_hidden", [True, False, None])
async def test_worker_says_once_that_a_version_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_hidden: bool | None
) -> None:
    engine = Nonsense()
    engine.in_hidden = in_hidden
    desk = Desk(tmp_path, engine=engine)
    fetcher = Folders(tmp_path, float("nan"))
    object.__setattr__(desk.loop.context, "fetcher", fetcher)
    publish_broken(desk.view)
    ticket = make_ticket(policy_version=BAD, policy_root=BAD_ROOT)
    desk.orchestrator.tickets.append(ticket)
    await run_until(desk.loop, lambda: desk.orchestrator.calls["lease"] > 5)
    said = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert [each.message for each in said] == [
        "the policy is not available, trying again until it is"
    ]
    error, hint = said[0].__dict__["error"], said[0].__dict__["hint"]
    assert error == f"policy version {BAD} is refused everywhere: its norm is not finite"
    assert "nothing is wrong with this machine" in hint
    assert BAD not in [version for _, version in engine.loaded]
    assert not desk.orchestrator.uploads
    desk.close()


async def test_worker_goes_on_with_the_next_version(tmp_path: Path) -> None:
    desk = Desk(tmp_path, engine=Nonsense())
    object.__setattr__(desk.loop.context, "fetcher", Folders(tmp_path, float("nan")))
    publish_broken(desk.view)
    broken = make_ticket(policy_version=BAD, policy_root=BAD_ROOT)
    desk.orchestrator.tickets.append(broken)

    def has_uploaded() -> bool:
        if desk.orchestrator.calls["lease"] > 2 and broken in desk.orchestrator.tickets:
            desk.orchestrator.tickets[0] = make_ticket()
        return bool(desk.orchestrator.uploads)

    await run_until(desk.loop, has_uploaded)
    desk.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), 1.0])
def test_weights_that_are_not_finite_are_named(
    tmp_path: Path, dtype: torch.dtype, number: float
) -> None:
    weight = torch.zeros(3, 5, dtype=dtype)
    weight[1, 2] = number
    whole = {"counts": torch.ones(2, dtype=torch.int64), "empty": torch.zeros(0)}
    save_file(whole, tmp_path / "a.safetensors")
    save_file({"up": weight}, tmp_path / "b.safetensors")
    if number == 1.0:
        require_finite(tmp_path, PolicyVersion(3))
        return
    with pytest.raises(PolicyBroken, match=r"version 3 .* its up is not finite"):
        require_finite(tmp_path, PolicyVersion(3))


def is_finite(folder: Path) -> bool:
    try:
        require_finite(folder, PolicyVersion(3))
    except PolicyBroken:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2),
        ("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", torch.float8_e5m2fnuz),
        ("F8_E8M0", torch.float8_e8m0fnu),
    ],
)
def test_a_byte_is_no_finite_weight_where_torch_reads_none(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    read = torch.arange(256, dtype=torch.uint8).view(dtype).float().isfinite().tolist()
    entry = {"dtype": name, "shape": [3], "data_offsets": [0, 3]}
    header = json.dumps({"up": entry}).encode()
    found = []
    for byte in range(256):
        stored = len(header).to_bytes(8, "little") + header + bytes([1, byte, 1])
        (tmp_path / "a.safetensors").write_bytes(stored)
        found.append(is_finite(tmp_path))
    assert found == read
    assert 0 < sum(found) < 256
