"""What a simulated network cost and how long things took, as numbers."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from muster.lab.simulator.chain import EPOCH
from muster.lab.simulator.world import World
from muster.protocol.messages import Verdict

GAS = {
    "publish": (78_902, 0),
    "commit": (74_505, 0),
    "post": (74_429, 1_584),
    "execute_fraud": (137_764, 0),
    "finalise_fraud": (97_077, 0),
}
"""Gas of a transaction, and of each record in it: `make bench-gas` (1 and 64 records)."""


def figures_of(world: World) -> dict[str, Any]:
    """Return a world's figures as JSON values; times in virtual, CPU in real seconds."""
    scenario, chain = world.scenario, world.chain
    records = [(b, r) for b in chain.state.batches.values() for r in b.records]
    uploaded = len(world.received_at)
    verdict_s = [
        b.header.posted_at - EPOCH - world.received_at[r.file]
        for b, r in records
        if r.file in world.received_at
    ]
    window = chain.fixed.challenge_window
    return {
        "workers": scenario.workers,
        "validators": scenario.validators,
        "seats": len(world.services.projection.run.validators),
        "quorum": scenario.quorum,
        "seed": scenario.seed,
        "virtual_s": round(EPOCH and chain.head.timestamp - EPOCH, 1),
        "digest": world.digest(),
        "submissions": uploaded,
        "verdicts": {
            verdict.name.lower(): sum(r.verdict == verdict for _, r in records)
            for verdict in Verdict
        },
        "to_verdict_s": spread(verdict_s),
        "to_payable_s": spread([s + window for s in verdict_s]),
        "messages": dict(sorted(world.desk.requests.items())),
        "messages_per_submission": _per(sum(world.desk.requests.values()), uploaded),
        "transactions": {kind: len(sizes) for kind, sizes in sorted(chain.mined.items())},
        "gas_per_submission": _per(_gas(world), uploaded),
        "workers_doing": _shares(world.doing),
        "validators_load": _load(world),
        "reorganisations": chain.reorganisations,
        "slashed": sum(escrow.amount for escrow in chain.state.escrows.values()) / 10**18,
        "cpu_s": {} if world.meter is None else _seconds(world),
    }


def _shares(counts: Counter[str]) -> dict[str, float]:
    return {name: round(count / counts.total(), 4) for name, count in sorted(counts.items())}


def _seconds(world: World) -> dict[str, float]:
    assert world.meter is not None
    return {kind: round(s, 3) for kind, s in sorted(world.meter.seconds.items())}


def _gas(world: World) -> int:
    total = 0
    for kind, sizes in world.chain.mined.items():
        base, each = GAS.get(kind, (0, 0))
        total += sum(base + each * size for size in sizes)
    return total


def _load(world: World) -> dict[str, float]:
    seated = world.services.projection.run.validators
    judged = [world.judged.get(p.name, (0, 0.0)) for p in world.validators if p.address in seated]
    counts, busy = [count for count, _ in judged], [seconds for _, seconds in judged]
    duration = world.chain.head.timestamp - EPOCH
    return {
        "checks_mean": round(sum(counts) / len(counts), 2),
        "checks_max": max(counts),
        "busy_mean": round(sum(busy) / len(busy) / duration, 4),
        "busy_max": round(max(busy) / duration, 4),
        "checks_per_submission": _per(sum(counts), len(world.received_at)),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, 95th percentile and largest of some values; empty for none."""
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "median": round(ordered[len(ordered) // 2], 2),
        "p95": round(ordered[min(int(len(ordered) * 0.95), len(ordered) - 1)], 2),
        "max": round(ordered[-1], 2),
    }


def _per(total: float, count: int) -> float:
    return round(total / count, 2) if count else 0.0
