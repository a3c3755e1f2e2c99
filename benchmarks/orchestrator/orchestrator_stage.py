"""The orchestrator that `make bench-orchestrator` loads: a process of its own.

It writes a history of any length into each database it is given, says who may sign what, and then
serves the whole application on one database after the other, each until SIGTERM. The chain is in
memory; everything else is what `muster orchestrator run` runs.
"""

import argparse
import gc
import json
import logging
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "unit" / "orchestrator"))

import uvloop
from benchmarks.orchestrator.dashboard import CHUNK, STEPS, pages, report_training
from dashboard_stage import History, store_rows
from orchestrator_fakes import RUN, Network

from muster.orchestrator.clock import BlockClock
from muster.orchestrator.db import open_database
from muster.orchestrator.db.query import plain
from muster.orchestrator.process import Leadership, serve_until_stopped
from muster.orchestrator.projection import Projection
from muster.orchestrator.services import Services
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address
from muster.protocol.recipe import TrainingRecipe

SUBMISSIONS_PER_STEP = 1000


def node_key(number: int) -> bytes:
    """Return the private key of a worker's node, worth nothing."""
    return keccak(b"node of worker %d" % number)


def node_of(number: int) -> Address:
    """Return a worker's node."""
    return address_of(node_key(number))


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("databases", nargs="+", help="a file's name in the folder, or a URL")
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--submissions", type=int, default=1_000_000)
    return parser.parse_args()


async def main(options: argparse.Namespace) -> None:
    """Fill the databases, then serve on each of them in turn."""
    training = TrainingRecipe(steps=0, submissions_per_step=SUBMISSIONS_PER_STEP, max_async_level=2)
    history = History(Network(training=training))
    history.register(options.workers, node_of)
    places = [_place(options.folder, name) for name in options.databases]
    # A history has no garbage, and collection would take longer than writing it.
    gc.disable()
    await fill(places, history, options.submissions)
    history.fund_and_pay()
    gc.enable()
    for number, place in enumerate(places):
        await serve(options.folder, number, place, history.network)


def _place(folder: Path, name: str) -> Path | str:
    return name if "://" in name else folder / name


async def fill(places: list[Path | str], history: History, submissions: int) -> None:
    """Write a history into every database, chunk by chunk."""
    databases = [await open_database(place) for place in places]
    for done in range(0, submissions, CHUNK):
        count = min(CHUNK, submissions - done)
        steps = max(1, STEPS * count // submissions)
        history.work(count, steps=steps, after=done * STEPS // submissions, cheaters=40)
        for database in databases:
            await store_rows(history, database)
        history.take()
    for database in databases:
        await report_training(database)
        if database.is_shared:
            await database.search(plain("CHECKPOINT"))
        await database.close()
    # Flush the history to disk now, so that it is not written during the load.
    os.sync()


async def serve(folder: Path, number: int, place: Path | str, network: Network) -> None:
    """Serve on a database until SIGTERM; `NUMBER.ready` says where, once it listens."""
    settings = OrchestratorSettings(
        run=RUN, keystore=folder / "unused", files=folder / f"files{number}", database=place,
        port=0, ready_file=folder / f"{number}.ready",
    )  # fmt: skip
    network.chain.time = int(time.time())
    chain_clock = BlockClock()
    chain_clock.update(network.chain.time)
    database = await open_database(place)
    services = await Services(
        settings,
        chain=network.chain,
        view=network.view,
        key=network.keys.orchestrator,
        documents=network.documents,
        database=database,
        clock=time.time,
        chain_clock=chain_clock,
    ).load()
    _describe(folder, services)
    # As the process does, see muster.orchestrator.process.
    gc.collect()
    gc.freeze()
    leadership = Leadership(str(place), network.chain) if database.is_shared else None
    await serve_until_stopped(services, network.chain, leadership)
    await database.close()


def _describe(folder: Path, services: Services) -> None:
    """Write the data that nodes need for signing, and the list of pages."""
    described = {
        "chain_id": services.domain.chain_id,
        "ledger": services.domain.verifying_contract,
        "audience": services.audience,
        "pages": pages(services.projection) if _has_history(services.projection) else {},
    }
    (folder / "stage.json").write_text(json.dumps(described))


def _has_history(projection: Projection) -> bool:
    return projection.total.accepted > 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    uvloop.run(main(arguments()))
