"""The signed requests of the benchmark's nodes, and queries of the database afterwards."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from benchmarks.orchestrator.orchestrator_load import wire
from benchmarks.orchestrator.orchestrator_stage import node_key

from muster.api.signing import SUBMISSION_HEADER, SUBMISSION_SIGNATURE_HEADER, sign_request
from muster.orchestrator.db.query import is_url
from muster.protocol.eip712 import Domain, digest, recover, sign
from muster.protocol.encoding import canonical_json, file_hash, hex0x
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import Submission, Ticket

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "unit" / "orchestrator"))

from orchestrator_fakes import submission_for

CHEATERS = 40
"""The stage's first workers are banned in the course of its history."""
JSON = {"content-type": "application/json"}
BEAT = b'{"run_id":1,"policy_version":%d,"state":"generating","software":"muster 0.1.0"}'
LEASE = b'{"run_id":1}'


@dataclass
class Stage:
    """One orchestrator under load: how to reach it, and what its nodes sign with."""

    url: str
    """Where it listens."""
    database: str
    """Its database: a file's path or a URL."""
    pid: int
    """Its process."""
    server_pid: int | None
    """The database's first process, if that is a server."""
    domain: Domain
    """EIP-712 domain of signatures."""
    audience: Address
    """Its account."""
    workers: int
    """Registered workers."""
    pages: dict[str, str]
    """Its pages, by name."""

    @classmethod
    def read(cls, folder: Path, number: int, **known: Any) -> Stage:
        """Read the description written by the stage's process."""
        said = json.loads((folder / "stage.json").read_text())
        return cls(
            url=(folder / f"{number}.ready").read_text().strip(),
            domain=Domain(said["chain_id"], said["ledger"]),
            audience=said["audience"],
            pages=said["pages"],
            **known,
        )

    def keys(self) -> list[bytes]:
        """Return the keys of nodes whose workers are active."""
        first = min(CHEATERS, self.workers // 2) + 1
        return [node_key(number) for number in range(first, self.workers + 1)]

    def heartbeats(self, count: int) -> list[bytes]:
        """Return signed heartbeats of the nodes in turn."""
        nodes = itertools.islice(itertools.cycle(self.keys()), count)
        return [self._post(key, "/v1/heartbeat", BEAT % (i % 7)) for i, key in enumerate(nodes)]

    def leases(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return requests of nodes for work."""
        return [self._post(key, "/v1/leases", LEASE) for key in keys]

    def uploads(self, tickets: Sequence[tuple[bytes, Ticket]], size_bytes: int) -> list[bytes]:
        """Return the uploads of a file for each node's ticket."""
        return [self._upload(key, ticket, os.urandom(size_bytes)) for key, ticket in tickets]

    def ticket(self, answer: bytes) -> Ticket:
        """Return an answer's ticket; it must be signed by the orchestrator."""
        said = json.loads(answer)
        ticket = Ticket.from_json(said["ticket"])
        signature = bytes.fromhex(said["signature"][2:])
        assert recover(digest(self.domain, ticket.struct_hash()), signature) == self.audience
        return ticket

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU seconds so far of the orchestrator, and of its database's server."""
        of_server = 0.0
        if self.server_pid is not None:
            server = psutil.Process(self.server_pid)
            of_server = sum(map(_cpu_s, [server, *server.children(recursive=True)]))
        return _cpu_s(psutil.Process(self.pid)), of_server

    def memory_mb(self) -> float:
        """Return the resident memory of the orchestrator."""
        return float(psutil.Process(self.pid).memory_info().rss) / 1e6

    def database_mb(self) -> float:
        """Return the size of the database."""
        if not is_url(self.database):
            return Path(self.database).stat().st_size / 1e6
        return self._ask("SELECT pg_database_size(current_database())") / 1e6

    def stored(self) -> dict[str, int]:
        """Return how many heartbeats, leases and submissions the database holds."""
        queries = {
            "heartbeats": "SELECT coalesce(sum(count), 0) FROM heartbeats",
            "leases": "SELECT count(*) FROM leases",
            "uploads": "SELECT count(*) FROM submissions",
        }
        return {name: self._ask(query) for name, query in queries.items()}

    def _ask(self, query: str) -> int:
        if not is_url(self.database):
            with contextlib.closing(sqlite3.connect(self.database)) as file:
                return int(file.execute(query).fetchone()[0])
        import psycopg

        with psycopg.connect(self.database) as server:
            row = server.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])

    def _post(self, key: bytes, path: str, body: bytes) -> bytes:
        return wire("POST", path, self._sign(key, "POST", path, file_hash(body)) | JSON, body)

    def _upload(self, key: bytes, ticket: Ticket, body: bytes) -> bytes:
        submission: Submission = submission_for(ticket, body)
        path = f"/v1/submissions/{ticket.run_id}/{ticket.step}/{ticket.index}"
        claim = sign(digest(self.domain, submission.struct_hash()), key)
        headers = self._sign(key, "PUT", path, submission.file_hash) | {
            SUBMISSION_HEADER: canonical_json(submission.to_json()).decode(),
            SUBMISSION_SIGNATURE_HEADER: hex0x(claim),
        }
        return wire("PUT", path, headers, body)

    def _sign(self, key: bytes, method: str, path: str, body_hash: Hash32) -> dict[str, str]:
        return sign_request(
            key, self.domain, self.audience, method, path, body_hash=body_hash,
            nonce=Hash32(os.urandom(32)), issued_at=int(time.time()),
        )  # fmt: skip


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
