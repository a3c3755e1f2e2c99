"""Observes a demo at each source separately: chain, trainer, database, balances, audit."""

import json
import sqlite3
import time
from pathlib import Path

from muster.app.demo.local_network import Network
from muster.app.demo.report import DemoObservations, RecordedSubmission, TrainedStep
from muster.chain import ChainView, read_view
from muster.chain.deployment import deployment_path
from muster.protocol.ids import Address, Hash32, RunId


async def observe(
    network: Network, run_id: RunId, steps: int, began: float, returned_at: int | None
) -> DemoObservations:
    """Collect what each source says: chain, trainer, database, balances, audit."""
    trained, evaluations = read_metrics(network.trainer_state / "metrics.jsonl")
    earned: dict[Address, int] = {}
    async with await network.connect() as chain:
        for member in network.cast.members:
            # All of the faucet's tokens went into the stake.
            earned[member.wallet.address] = await chain.token.balance_of(member.wallet.address)
        chain_id, view = chain.chain_id, await read_view(chain, ChainView())
    return DemoObservations(
        cast=network.cast,
        run_id=run_id,
        view=view,
        steps=steps,
        returned_at=returned_at,
        wall_s=time.monotonic() - began,
        evaluations=evaluations,
        trained=trained,
        stored=read_database(network.database),
        earned_wei=earned,
        audit=await network.audit(run_id),
        staked_wei=dict(network.staked),
        rpc=network.rpc,
        chain_id=chain_id,
        deployments=str(deployment_path(network.options.deployments, chain_id)),
    )


def read_metrics(path: Path) -> tuple[list[TrainedStep], list[tuple[int, float]]]:
    """Return the trainer's steps and its evaluations by policy version."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [
        TrainedStep(e["stream_from"], e["stream_to"], e["reward"]) for e in entries if "step" in e
    ]
    measured = [e["eval"] for e in entries if "eval" in e]
    evaluations = [(e["policy_version"], e["reward"]) for e in measured if e["reward"] is not None]
    return steps, evaluations


def read_database(path: Path) -> list[RecordedSubmission]:
    """Return the submissions in the orchestrator's database, read only."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)
    try:
        rows = connection.execute("SELECT file_hash, batch_root, position FROM submissions")
        return [
            RecordedSubmission(Hash32(bytes(h)), Hash32(bytes(root)) if root else None, position)
            for h, root, position in rows
        ]
    finally:
        connection.close()
