"""A8 to A10, A13, A29, A33, A35, A39: false claims about work's author, slot, time or encoding.

Nothing here is about a model: the work itself is honest, and somebody did it.
"""

import io
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from muster.api.signing import (
    NONCE_LIFE_S,
    REQUEST_FUTURE_S,
    REQUEST_VALIDITY_S,
    sign_request,
    verify_request,
)
from muster.client.tickets import KnownPolicy
from muster.client.validator.batches import SlotIndex, SlotOfWorker
from muster.lab.redteam.gain import Gain
from muster.lab.redteam.stage import (
    DOMAIN,
    NODE,
    NOW,
    ORCHESTRATOR,
    ROOT,
    THIEF,
    VERSION,
    Delivery,
    Stage,
    Worker,
)
from muster.lab.redteam.trials import Attack, Outcome, Play, Variant
from muster.protocol.eip712 import Domain, address_of
from muster.protocol.encoding import file_hash, hex0x, keccak
from muster.protocol.errors import ApiError, EncodingError
from muster.protocol.ids import Hash32, to_address
from muster.protocol.messages import Reason
from muster.protocol.rollouts import SCHEMA, Bounds

ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
THIEF_WALLET = to_address(keccak(b"thief's wallet")[:20])
SLOWEST_FILE_S = 30.0
"""A hostile file that occupies the decoder for longer has won."""


def _honest(stage: Stage, random: Random) -> Delivery:
    return Worker(stage, random).deliver(stage.ticket(random))


# A8: one submission in many encodings


def _malleable_signature(stage: Stage, random: Random) -> Outcome:
    delivery = _honest(stage, random)
    r, s, v = delivery.signature[:32], delivery.signature[32:64], delivery.signature[64]
    turned = (ORDER - int.from_bytes(s, "big")).to_bytes(32, "big")
    forms = (
        r + turned + bytes([v ^ 7]),  # 27 <-> 28: the other half's twin
        r + turned + bytes([v]),
        r + s + bytes([v - 27]),
        r + s + bytes([v + 8]),
        delivery.signature + b"\0",
        delivery.signature[:64],
        bytes(65),
    )
    again = replace(delivery, signature=random.choice(forms))
    return stage.outcome(again, Reason.BAD_SIGNATURE)


def _slot_index(delivery: Delivery, batch_id: int) -> SlotIndex:
    index = SlotIndex()
    index.add(batch_id, (_slot(delivery),))
    return index


def _slot(delivery: Delivery) -> SlotOfWorker:
    return (1, delivery.submission.step, delivery.submission.index)


def _later(first: Delivery, second: Delivery, random: Random) -> Delivery:
    """Return the second delivery as it stands in a batch after the first one's."""
    batch_id = random.randint(1, 1000)
    index = _slot_index(first, batch_id)
    return replace(
        second, is_slot_used=index.is_used(_slot(second), before=batch_id + random.randint(1, 9))
    )


def _encoded_again(stage: Stage, random: Random) -> Outcome:
    """The same rows in another Parquet file, whose other hash is to be paid again."""
    ticket = stage.ticket(random)
    worker = Worker(stage, random)
    rows = worker.generate(ticket)
    first = worker.finish(ticket, rows)
    table = pq.read_table(io.BytesIO(first.data or b""))
    out = io.BytesIO()
    codec = random.choice(("none", "gzip", "snappy", "zstd"))
    pq.write_table(table, out, compression=codec, row_group_size=random.randint(1, len(rows)))
    submission = worker.claim(ticket, rows, out.getvalue())
    second = Delivery(submission, stage.sign(submission), ticket, out.getvalue())
    return stage.outcome(_later(first, second, random), Reason.SLOT_REUSED)


# A9: own work again


def _same_again(stage: Stage, random: Random) -> Outcome:
    delivery = _honest(stage, random)
    return stage.outcome(_later(delivery, delivery, random), Reason.SLOT_REUSED)


def _old_file(stage: Stage, random: Random) -> Outcome:
    """Last step's rollouts under this step's ticket."""
    worker = Worker(stage, random)
    old = worker.generate(stage.ticket(random))
    ticket = stage.ticket(random)
    delivery = worker.finish(ticket, old)
    return stage.outcome(delivery, Reason.WRONG_PROBLEM, Reason.WRONG_SEED)


def _old_text(stage: Stage, random: Random) -> Outcome:
    """Old completions and proofs, relabelled with the new ticket's problems and seeds."""
    worker = Worker(stage, random)
    old, ticket = worker.generate(stage.ticket(random)), stage.ticket(random)
    rows = [
        replace(mine, completion_tokens=was.completion_tokens, proofs=was.proofs)
        for mine, was in zip(worker.generate(ticket), old, strict=True)
    ]
    rows = [replace(row, task_reward=stage.grade(row)) for row in rows]
    delivery = worker.finish(ticket, rows)
    return stage.outcome(delivery, Reason.TOPLOC_MISMATCH, Reason.SAMPLER_MISMATCH)


# A10: somebody else's work


def _copied_under_own_ticket(stage: Stage, random: Random) -> Outcome:
    worker = Worker(stage, random)
    ticket = stage.ticket(random)
    rows = worker.generate(ticket)
    mine = replace(ticket, worker=THIEF_WALLET)
    submission = worker.claim(mine, rows, worker.encode(rows))
    delivery = Delivery(
        submission, stage.sign(submission, THIEF), mine, worker.encode(rows),
        node=address_of(THIEF),
    )  # fmt: skip
    terms = stage.known(worker=THIEF_WALLET)
    return stage.outcome(delivery, Reason.WRONG_PROBLEM, Reason.WRONG_SEED, terms=terms)


def _copied_under_own_signature(stage: Stage, random: Random) -> Outcome:
    """The victim's submission, signed by the thief: the slot would still be the victim's."""
    delivery = _honest(stage, random)
    stolen = replace(delivery, signature=stage.sign(delivery.submission, THIEF))
    return stage.outcome(stolen, Reason.BAD_SIGNATURE)


def _copied_under_victims_ticket(stage: Stage, random: Random) -> Outcome:
    """The victim's file and ticket, claimed for the thief's wallet."""
    delivery = _honest(stage, random)
    mine = replace(delivery.submission, worker=THIEF_WALLET)
    stolen = replace(
        delivery, submission=mine, signature=stage.sign(mine, THIEF), node=address_of(THIEF)
    )
    return stage.outcome(stolen, Reason.UNKNOWN_TICKET, terms=stage.known(worker=THIEF_WALLET))


# A13: identities for easy seeds


def _too_young(stage: Stage, random: Random) -> Outcome:
    """An identity, chosen among many, that joined after the beacon was known. Its own beacon is
    that of the block in which it joined.
    """
    delivery = _honest(stage, random)
    joined = KnownPolicy(ROOT, keccak(random.randbytes(8)))
    terms = stage.known(policies={VERSION: joined})
    return stage.outcome(delivery, Reason.UNKNOWN_TICKET, terms=terms)


def _own_beacon(stage: Stage, random: Random) -> Outcome:
    """A ticket with another beacon, even with the orchestrator's signature."""
    ticket = stage.ticket(random, beacon=keccak(random.randbytes(8)))
    return stage.outcome(Worker(stage, random).deliver(ticket), Reason.UNKNOWN_TICKET)


def _own_ticket(stage: Stage, random: Random) -> Outcome:
    """A ticket that the worker signed itself."""
    return stage.outcome(replace(_honest(stage, random), ticket_key=THIEF), Reason.UNKNOWN_TICKET)


# A29: captured requests


def _replayed_request(change: Callable[[Random], dict[str, Any]], *codes: str) -> Play:
    """A captured request, sent again with a change."""

    def play(_stage: Stage, random: Random) -> Outcome:
        audience = address_of(ORCHESTRATOR)
        body = random.randbytes(20)
        as_sent: dict[str, Any] = {
            "domain": DOMAIN, "audience": audience, "method": "POST", "path": "/v1/leases",
            "now": float(NOW),
        }  # fmt: skip
        nonce = Hash32(random.randbytes(32))
        headers = sign_request(
            NODE, DOMAIN, audience, "POST", "/v1/leases", body, nonce=nonce, issued_at=NOW
        )
        changes = change(random)
        headers |= changes.pop("headers", {})
        for name in changes.pop("without", ()):
            headers.pop(name)
        try:
            verify_request(headers, **(as_sent | changes))
        except ApiError as error:
            return Outcome(error.code in codes, "REFUSED", error.code)
        return Outcome(False, "TAKEN")

    return play


def _elsewhere(random: Random) -> dict[str, Any]:
    places: list[dict[str, Any]] = [
        {"path": "/v1/heartbeat"},
        {"method": "PUT"},
        {"audience": address_of(THIEF)},
        {"domain": Domain(1 + random.randrange(1000), DOMAIN.verifying_contract)},
        {"headers": {"x-muster-body-hash": hex0x(file_hash(random.randbytes(9)))}},
        {"path": "/v1/leases?x=1"},
    ]
    return random.choice(places)


def _undated(random: Random) -> dict[str, Any]:
    names = ("issued-at", "nonce", "signature", "address", "body-hash")
    return {"without": (f"x-muster-{random.choice(names)}",)}


def _late(random: Random) -> dict[str, Any]:
    """After the request's validity. Nonces are remembered for longer, so there is no gap."""
    edges = (REQUEST_VALIDITY_S + 1, NONCE_LIFE_S - 1, NONCE_LIFE_S, NONCE_LIFE_S + 1)
    return {"now": float(NOW + random.choice((*edges, random.randrange(61, 10**6))))}


def _early(random: Random) -> dict[str, Any]:
    return {"now": float(NOW - REQUEST_FUTURE_S - 1 - random.randrange(10**6))}


def _redated(random: Random) -> dict[str, Any]:
    later = NOW + random.randrange(1, 10**6)
    return {"headers": {"x-muster-issued-at": str(later)}, "now": float(later)}


def _replayed_in_time(stage: Stage, random: Random) -> Outcome:
    """The same request again while it is valid: the orchestrator must remember its nonce."""
    from muster.lab.redteam.memory import send_twice

    return stage.run(send_twice(stage.folder, random))


# A33: files that are not there


def _withheld(stage: Stage, random: Random) -> Outcome:
    return stage.outcome(replace(_honest(stage, random), data=None), Reason.FILE_UNAVAILABLE)


def _two_files(stage: Stage, random: Random) -> Outcome:
    """The worker serves another file to some; it does not have the signed hash."""
    mine, other = _honest(stage, random), _honest(stage, random)
    from muster.lab.redteam.memory import fetch_file

    return stage.run(fetch_file(mine.submission.file_hash, other.data or b""))


def _late_commitment(stage: Stage, random: Random) -> Outcome:
    """Work that was held back until others' work could be seen."""
    delivery = _honest(stage, random)
    return stage.outcome(
        replace(delivery, committed_at=NOW + 661 + random.randrange(10**6)), Reason.LATE
    )


# A35: files that hurt


def _hostile_file(stage: Stage, random: Random) -> Outcome:
    """A damaged file, or random bytes."""
    data = bytearray(_honest(stage, random).data or b"")
    kind = random.randrange(4)
    if kind == 0:
        for _ in range(random.randint(1, 8)):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == 1:
        del data[random.randrange(1, len(data)) :]
    elif kind == 2:
        start = random.randrange(len(data))
        data[start : start + random.randint(1, 64)] = random.randbytes(random.randint(0, 64))
    else:
        data = bytearray(random.randbytes(random.randint(0, 4096)))
    return _decoded(stage, bytes(data))


def _bomb(stage: Stage, random: Random) -> Outcome:
    """A small file that unpacks into a large one: repeated rows, or one enormous cell."""
    if random.random() < 0.1:
        cell = bytes(random.randint(257, 300) << 20)
        return _decoded(stage, _parquet([{**_cells(), "proofs": cell}]))
    many = random.randint(129, 20_000)
    return _decoded(stage, _parquet([_cells()] * many))


def _wrong_shape(stage: Stage, random: Random) -> Outcome:
    row = _cells()
    kind = random.randrange(4)
    if kind == 0:
        row["prompt_tokens"] = []
    elif kind == 1:
        row["completion_tokens"] = [-random.randint(1, 1 << 31)]
    elif kind == 2:
        row["group"] = -1
    else:
        table = pa.Table.from_pylist([{**row, "more": 1}])
        return _decoded(stage, _written(table))
    return _decoded(stage, _parquet([row]))


def _decoded(stage: Stage, data: bytes) -> Outcome:
    """Return whether the decoder survives a file: it may refuse it, or read valid rows."""
    started = time.perf_counter()
    try:
        stage.run(stage.decoder.decode(data, Bounds.of(stage.recipe)))
        verdict = "READ"  # rows that a flipped bit left valid are judged like any others
    except EncodingError:
        verdict = "REFUSED"
    took = time.perf_counter() - started
    return Outcome(took < SLOWEST_FILE_S, verdict, "", found_after=took)


def _cells() -> dict[str, Any]:
    return {
        "problem_id": "p", "group": 0, "sample": 0, "sampling_seed": 1, "target_length": -1,
        "policy_version": 8, "prompt_tokens": [1], "completion_tokens": [1], "proofs": b"",
        "task_reward": 0.0,
    }  # fmt: skip


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    return _written(pa.Table.from_pylist(rows, schema=SCHEMA))


def _written(table: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()


def _overlong_arrays(stage: Stage, random: Random) -> Outcome:
    """A completion far beyond the limit, with proofs to match."""
    ticket = stage.ticket(random)
    worker = Worker(stage, random)
    rows = worker.generate(ticket)
    place, length = random.randrange(len(rows)), random.randint(7, 20_000)
    rows[place] = replace(rows[place], completion_tokens=tuple([5] * length))
    delivery = worker.finish(ticket, rows)
    return stage.outcome(delivery, Reason.SCHEMA, Reason.PROOF_COUNT, Reason.PROOF_ENCODING)


# A39: keys


def _rotated_key(stage: Stage, random: Random) -> Outcome:
    """Work signed with a node key that was replaced before the batch."""
    delivery = _honest(stage, random)
    return stage.outcome(
        replace(delivery, node=address_of(keccak(random.randbytes(8)))), Reason.BAD_SIGNATURE
    )


def _inactive(stage: Stage, random: Random) -> Outcome:
    """Work of a worker that was jailed or has left."""
    return stage.outcome(replace(_honest(stage, random), node=None), Reason.BAD_SIGNATURE)


ATTACKS = (
    Attack(
        "A8",
        "one submission in many encodings, to be counted more than once",
        "slots are paid, not files or signatures; 65 bytes, lower-half s (check 1, contracts)",
        "hard",
        (
            Variant("signature malleated", _malleable_signature),
            Variant("file encoded again", _encoded_again),
        ),
        Gain(saved=1.0),
    ),
    Attack(
        "A9",
        "own work submitted again",
        "a slot is used once (check 1); seeds contain step and index (check 3)",
        "hard",
        (
            Variant("the same submission", _same_again),
            Variant("an old file under a new ticket", _old_file),
            Variant("old text relabelled", _old_text),
        ),
        Gain(saved=1.0),
    ),
    Attack(
        "A10",
        "somebody else's work, copied",
        "the worker is in what is signed and in the seeds (checks 1 and 3)",
        "hard",
        (
            Variant("under the thief's own ticket", _copied_under_own_ticket),
            Variant("under the thief's signature", _copied_under_own_signature),
            Variant("under the victim's ticket", _copied_under_victims_ticket),
        ),
        Gain(saved=1.0),
    ),
    Attack(
        "A29",
        "signed requests captured and sent again",
        "nonces outlive validity; bound to chain, orchestrator, method, path and body",
        "hard",
        (
            Variant("while it is valid", _replayed_in_time),
            Variant("after its time", _replayed_request(_late, "request_expired")),
            Variant("dated ahead", _replayed_request(_early, "request_from_future")),
            Variant("dated anew", _replayed_request(_redated, "bad_signature")),
            Variant("to another place", _replayed_request(_elsewhere, "bad_signature")),
            Variant("without a header", _replayed_request(_undated, "unsigned_request")),
        ),
        Gain(saved=0.0, extra=1.0),
        time_unit="request",
    ),
    Attack(
        "A33",
        "work committed and its file withheld, or different files for different validators",
        "what cannot be had is not paid (check 1); files are named by their hash",
        "hard",
        (
            Variant("withheld from all", _withheld),
            Variant("another file served", _two_files),
            Variant("committed late", _late_commitment),
        ),
        Gain(saved=1.0),
    ),
    Attack(
        "A35",
        "files made to crash, fill or delay a validator",
        "caps before parsing, a decoder that may die alone, proof counts before any prefill",
        "hard",
        (
            Variant("damaged", _hostile_file),
            Variant("unpacks into much", _bomb),
            Variant("wrong shapes", _wrong_shape),
            Variant("overlong completions", _overlong_arrays),
        ),
        Gain(saved=0.0),
        time_unit="s",
    ),
    Attack(
        "A39",
        "a stolen or retired node key goes on signing",
        "the node is the chain's at the commitment; one transaction replaces it (check 1)",
        "hard",
        (Variant("replaced key", _rotated_key), Variant("jailed or gone", _inactive)),
        Gain(saved=1.0),
    ),
)

YOUNG = (
    Variant("joined once the beacon was known", _too_young),
    Variant("a beacon of its own", _own_beacon),
    Variant("a ticket of its own", _own_ticket),
)
"""The part of A13 that is refused outright; the rest is in `economy`."""
