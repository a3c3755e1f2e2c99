"""An orchestrator over a fake chain in a process of its own, for tests of what attacks cost."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import psutil
from orchestrator_fakes import Keys, Network

from muster.protocol.encoding import keccak

KEYS = Keys(
    orchestrator=keccak(b"orchestrator"),
    trainer=keccak(b"trainer"),
    validators=[keccak(b"validator %d" % n) for n in range(3)],
    nodes=[keccak(b"node %d" % n) for n in range(3)],
)
"""Accounts whose requests the process serves; its clock stands still at `NOW`."""


@contextmanager
def serving(
    folder: Path, *, workers: int = 0, **settings: Any
) -> Iterator[tuple[psutil.Process, int]]:
    """Start such an orchestrator, of at least so many workers; yields its process and its port."""
    arguments = [sys.executable, __file__, str(folder), str(workers), json.dumps(settings)]
    with Popen(arguments, stdout=PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            yield psutil.Process(process.pid), int(url.rpartition(":")[2])
        finally:
            process.terminate()


async def main(folder: Path, workers: int, settings: dict[str, Any]) -> None:
    """Serve until SIGTERM; print the URL once it listens."""
    from dashboard_stage import History
    from orchestrator_bench import open_bench

    from muster.orchestrator.process import serve_until_stopped

    ready, network = folder / "ready", Network(keys=KEYS)
    History(network).register(workers)

    async def announce() -> None:
        while not ready.exists():
            await asyncio.sleep(0.02)
        print(ready.read_text().strip(), flush=True)  # noqa: T201

    async with (
        open_bench(folder, network, port=0, ready_file=ready, poll_s=0.1, **settings) as bench,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(announce())
        await serve_until_stopped(bench.services, bench.network.chain)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])))
