"""Hostile clients, files, relays and answers: each attack, its result, and its test."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nuisance:
    """An attack that aims to deny service to others, or to have them judged wrongly."""

    title: str
    """What the attacker does."""
    now: str
    """What happens."""
    shown: str
    """The test that plays it, below `tests/`."""


CLIENTS, FILES = "unit/orchestrator/", "unit/client/validator/test_client_"
NUISANCES = (
    Nuisance(
        "sends bodies that never end, unsigned or signed by anybody",
        "who has no role is refused before its body; bodies of one signer push out each other",
        "integration/orchestrator/test_hostile_sockets.py",
    ),
    Nuisance(
        "holds every connection and event stream from few addresses, or many",
        "who comes is served; of the network and address with most, the quietest leaves",
        f"{CLIENTS}http/test_orchestrator_hostile_clients.py",
    ),
    Nuisance(
        "sends strings that PostgreSQL cannot store",
        "refused at the door; a row that fails is found in halves, and refused alone",
        f"{CLIENTS}db/test_orchestrator_strings.py",
    ),
    Nuisance(
        "takes every ticket, changing its node or letting them lapse",
        "tickets are of the worker: as many as delivered work earned, its share by stake at most",
        f"{CLIENTS}leases/test_orchestrator_hoarding.py",
    ),
    Nuisance(
        "copies what the first validator found",
        "nobody is told of outcomes before they are posted",
        f"{CLIENTS}outcomes/test_orchestrator_copying.py",
    ),
    Nuisance(
        "claims too few units, so that its batch is refused",
        "it alone is found out; a misdeclared batch uses no slots, its work is submitted again",
        "integration/network/test_silence_network.py",
    ),
    Nuisance(
        "delivers files of 25 kB that stand for millions of values",
        "refused by their headers, before anything is decoded",
        f"{FILES}decoding.py",
    ),
    Nuisance(
        "has validators run out of memory, disk or processes",
        "they say that they were disturbed, and judge nobody until they are not",
        f"{FILES}disturbed.py",
    ),
    Nuisance(
        "leans every choice within the margin towards shorter or other text",
        "a worker's judged submissions are tested together: SAMPLER_DRIFT",
        f"{FILES}conduct.py",
    ),
    Nuisance(
        "answers with what is almost a number",
        "what is not finished equals its own text alone",
        "unit/tasks/test_tasks_math.py",
    ),
    Nuisance(
        "writes programs that fill inodes, or stop their runner",
        "1,024 files; a watchdog outside ends them in time",
        "unit/tasks/test_tasks_sandbox.py",
    ),
    Nuisance(
        "drips weights from eight relays",
        "who is far slower than others is left, and its bytes are asked of another",
        "integration/shardcast/test_shardcast_drip.py",
    ),
    Nuisance(
        "publishes a delta that would fill disks",
        "refused by its sizes before a byte is written; what failed is removed",
        "integration/shardcast/test_delta_network.py",
    ),
)
"""All attacks."""


def table() -> str:
    """Return the page's part about these attacks."""
    lines = [
        "## Hostile clients, files, relays and answers",
        "",
        "Whoever wants nothing but that others are not served. `muster redteam --hostile` plays",
        "the first three and the files together against a network of five honest workers; the",
        "figures are those of `make bench-hostile` (`benchmarks/results/hostile.json`).",
        "",
        "| somebody … | what happens | played by `tests/` |",
        "|---|---|---|",
    ]
    lines += [f"| {each.title} | {each.now} | `{each.shown}` |" for each in NUISANCES]
    return "\n".join(lines) + "\n"
