"""A machine's hardware report, and its shortcomings."""

from pathlib import Path
from typing import Any

from worlds.client_desk import Desk, run_until
from worlds.client_world import DOMAIN, NODE_KEY, RUN

from muster.api import HeartbeatAnswer
from muster.client.hardware import Machine, measure, report, shortcomings
from muster.protocol.eip712 import address_of, digest, recover
from muster.protocol.recipe import HardwareRecipe

MACHINE = Machine(cpu_cores=8, memory_mb=64_000, gpu_memory_mb=(24_000, 80_000))


def test_this_machine_has_cores_and_memory() -> None:
    found = measure()
    assert found.cpu_cores >= 1
    assert found.memory_mb >= 256


def test_a_report_is_signed_by_the_node_and_names_the_largest_gpu() -> None:
    said, signature = report(MACHINE, RUN, NODE_KEY, DOMAIN)
    assert recover(digest(DOMAIN, said.struct_hash()), signature) == address_of(NODE_KEY)
    assert (said.cpu_cores, said.memory_mb, said.gpus, said.gpu_memory_mb) == (8, 64_000, 2, 80_000)


def test_what_a_machine_lacks_is_named_with_both_figures() -> None:
    asked = HardwareRecipe(min_memory_mb=65_000, min_gpu_memory_mb=80_001)
    assert shortcomings(MACHINE, asked) == [
        "64000 MiB of memory, the run asks for 65000",
        "80000 MiB of GPU memory, the run asks for 80001",
    ]
    assert shortcomings(MACHINE, HardwareRecipe(min_gpu_memory_mb=80_000)) == []
    assert shortcomings(Machine(1, 1, ()), HardwareRecipe()) == []


async def test_a_worker_reports_its_machine_once_and_whenever_it_is_asked(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    sent: list[bool] = []

    async def heartbeat(_run: object, *, hardware: Any, **_said: object) -> HeartbeatAnswer:
        sent.append(hardware is not None)
        # The third answer forgets: an orchestrator that lost its database.
        return HeartbeatAnswer(status="active", policy_version=None, wants_hardware=len(sent) == 3)

    desk.orchestrator.heartbeat = heartbeat  # type: ignore[method-assign]
    await run_until(desk.loop, lambda: len(sent) >= 5)
    assert sent[:5] == [True, False, False, True, False]
    desk.close()
