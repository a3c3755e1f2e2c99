"""Writes the golden vectors on which Python and Solidity must agree, computed by the project.

    python tests/conformance/generate.py

The vectors are committed. `test_vectors.py` fails when regenerating changes them, and
`contracts/test/Conformance.t.sol` runs the same files against the contracts, with the signatures
made here; `contracts/test/Sampling.t.sol` recomputes the sampling hashes. A changed vector is a
changed protocol.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from muster.chain.structs import NO_HASH, Batch, BatchStatus
from muster.deploy.plan import created_addresses, factory_address
from muster.inference.sampling import token_hashes
from muster.protocol import merkle, schedule, seeds
from muster.protocol.checking import (
    Checking,
    CheckReport,
    block_seed,
    fingerprints_hash,
    pack_fingerprints,
    split_blocks,
)
from muster.protocol.eip712 import Domain, address_of, digest, sign, struct_hash
from muster.protocol.encoding import address_bytes, file_hash, hex0x, keccak
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step, to_address
from muster.protocol.jury import (
    BenchPlace,
    Ruling,
    claim_announcement,
    draw_jury,
    jury_seed,
    summons_of,
    vote_commitment,
)
from muster.protocol.messages import (
    ApiRequest,
    Checkpoint,
    NodeRegistration,
    OutcomeRecord,
    Outcomes,
    Reason,
    Submission,
    Ticket,
    Verdict,
    pack_records,
)
from muster.protocol.set_aside import SetAside
from muster.toploc.projections import balanced_signs, channel_signs, project

VECTORS = Path(__file__).parent / "vectors"

CHAIN_ID = 31337
FAR_DEADLINE = 4_102_444_800
PRICE = 10**16
POSTED_AT = 1_700_003_600
PERMIT = "Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"
TREE_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 33)


def key(name: str) -> bytes:
    """Return the private key of a named actor."""
    return keccak(f"muster conformance: {name}".encode())


def contract(name: str) -> Address:
    """Return the address at which a contract's domain lives."""
    return to_address(keccak(name.encode())[12:])


def domain(name: str) -> Domain:
    """Return a contract's EIP-712 domain."""
    return Domain(CHAIN_ID, contract(name))


WORKER = address_of(key("worker"))
NODE = address_of(key("node"))
VALIDATORS = sorted((key("validator 0"), key("validator 1")), key=lambda k: address_of(k).lower())
BEACON = keccak(b"beacon")


def deployment() -> dict[str, Any]:
    """Return the addresses of a factory and of the contracts that it makes."""
    account, salt = address_of(key("deployer")), keccak(b"a network")
    factory = factory_address(salt, account)
    created = list(created_addresses(factory).values())
    return {"account": account, "salt": hex0x(salt), "factory": factory, "created": created}


def documents() -> dict[str, Any]:
    """Return every vector file's content by name."""
    return {
        "seeds": {"cases": [seed_case(**case) for case in SEED_CASES]},
        "eip712": eip712(),
        "batch": batch(),
        "sampling": {"cases": [sampling_case(*case) for case in SAMPLING_CASES]},
        "jury": jury(),
        "schedule": {"cases": [schedule_case(*case) for case in SCHEDULE_CASES]},
        "merkle": {"trees": [tree(size) for size in TREE_SIZES]},
        "checking": checking(),
        "deployment": deployment(),
    }


def render(document: Any) -> str:
    """Return the text of a vector file."""
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


# ------------------------------------------------------------------------- sampling

SAMPLING_CASES = (
    (0, 0, 0),
    (2**64 - 1, 2**32 - 1, 151_935),
    (0x0123456789ABCDEF, 5, 1),
    (0x0123456789ABCDEF, 6, 1),
    (0xFEDCBA9876543210, 5, 1),
    (1 << 32, 1, 31),
    (1, 1 << 20, 128_255),
)
"""(seed, position, token id)."""


def sampling_case(seed: int, position: int, token: int) -> dict[str, Any]:
    """Return the integer from which a token's noise is computed."""
    word = int(token_hashes([seed], [position], token + 1)[0, token])
    return {"seed": uint(seed), "position": position, "token": token, "hash": word}


# ---------------------------------------------------------------------------- seeds

SEED_CASES: tuple[dict[str, Any], ...] = (
    {"run_id": 1, "beacon": BEACON, "worker": WORKER, "step": 1, "index": 0, "set_size": 32},
    {"run_id": 2**64 - 1, "beacon": b"\xff" * 32, "worker": NODE, "step": 2**32 - 1,
     "index": 2**32 - 1, "set_size": 7},
    {"run_id": 0, "beacon": b"\0" * 32, "worker": "0x" + "00" * 20, "step": 0, "index": 0,
     "set_size": 1},
    {"run_id": 7, "beacon": keccak(b"another"), "worker": WORKER, "step": 41, "index": 3,
     "set_size": 285_000},
)  # fmt: skip
LENGTHS = (1000, 2000, 3000, 4000, 6000)
WEIGHTS, PART_SIZES = (5, 0, 3, 1_000_000, 600_000), (40, 9, 12, 8, 285_000)
SMALL_SIZES, REVISIT = (40, 27, 27, 40, 100), (0, 2, 3, 4, 1000)
LISTED = tuple(i for i in range(40, sum(SMALL_SIZES)) if i * 7 % 3)
"""Problems set aside: two of three, but none of the first part, which skips none."""
SAMPLES = 16


def seed_case(
    *, run_id: int, beacon: bytes, worker: str, step: int, index: int, set_size: int
) -> dict[str, Any]:
    """Return everything derived from one ticket; small sets are drawn empty, so repeats occur."""
    seed = seeds.ticket_seed(RunId(run_id), Hash32(beacon), to_address(worker), Step(step), index)
    count = min(set_size, 8)
    parts = [seeds.part_of(seed, j, WEIGHTS) for j in range(count)]
    listed = SetAside.of(LISTED, sum(SMALL_SIZES))
    revisit = [REVISIT[part] for part in parts]
    return {
        "run_id": uint(run_id),
        "beacon": hex0x(beacon),
        "worker": to_address(worker),
        "step": step,
        "index": index,
        "ticket_seed": hex0x(seed),
        "draws": [
            {
                "purpose": int(purpose),
                "counter": counter,
                "value": uint(seeds.draw(seed, purpose, counter)),
            }
            for purpose in seeds.Purpose
            for counter in (0, 1, 1000)
        ],
        "task_set_size": set_size,
        "problem_indices": seeds.problem_indices(seed, count, set_size),
        "weights": list(WEIGHTS),
        "part_sizes": list(PART_SIZES),
        "parts": parts,
        "mixed_indices": seeds.mixed_indices(seed, _ranges(PART_SIZES, parts)),
        "small_sizes": list(SMALL_SIZES),
        "set_aside": hex0x(listed.bits),
        "revisit": revisit,
        "indices_past_the_list": seeds.mixed_indices(
            seed, _ranges(SMALL_SIZES, parts), listed, revisit
        ),
        "lengths": list(LENGTHS),
        "target_lengths": [seeds.target_length(seed, j, LENGTHS) for j in range(count)],
        "samples_per_problem": SAMPLES,
        "sample_seeds": [uint(seeds.sample_seed(seed, j, j + 1, SAMPLES)) for j in range(count)],
    }


def _ranges(sizes: Sequence[int], parts: Sequence[int]) -> list[range]:
    """Return the range of each part, where parts have these sizes."""
    starts = [0, *accumulate(sizes)]
    return [range(starts[part], starts[part + 1]) for part in parts]


def uint(value: int) -> str:
    """Return an integer that JSON numbers cannot hold in every language."""
    return f"{value:#x}"


# -------------------------------------------------------------------------- messages


def eip712() -> dict[str, Any]:
    """Return one signed message of every type, and the domains."""
    names = ("ContributionLedger", "WorkerRegistry", "RunRegistry", "MusterToken")
    return {
        "chain_id": CHAIN_ID,
        "domains": {
            n: {"address": contract(n), "separator": hex0x(domain(n).separator())} for n in names
        },
        "messages": messages(),
    }


def messages() -> dict[str, Any]:
    """Return one message of every type of docs/protocol.md section 3, and the token's permit.

    Ticket and submission are of one slot: together they are leased work.
    """
    registration = NodeRegistration(WORKER, NODE, 0, FAR_DEADLINE)
    checkpoint = Checkpoint(RunId(1), PolicyVersion(3), keccak(b"manifest"))
    ticket = Ticket(
        RunId(1), WORKER, Step(4), 2, PolicyVersion(3), keccak(b"manifest"), BEACON, FAR_DEADLINE
    )
    outcomes = Outcomes(1, keccak(b"submissions"), keccak(b"records"))
    request = ApiRequest(
        NODE, "POST", "/v1/leases?x=é", file_hash(b"{}"), keccak(b"nonce"), 1_700_000_000
    )
    return {
        "NodeRegistration": message("WorkerRegistry", "node", registration, {
            "worker": WORKER, "node": NODE, "nonce": 0, "deadline": FAR_DEADLINE,
        }),
        "Checkpoint": message("RunRegistry", "trainer", checkpoint, {
            "runId": 1, "version": 3, "manifestRoot": hex0x(checkpoint.manifest_root),
        }),
        "Ticket": message("ContributionLedger", "orchestrator", ticket, {
            "runId": 1, "worker": WORKER, "step": 4, "index": 2, "policyVersion": 3,
            "policyRoot": hex0x(ticket.policy_root), "beacon": hex0x(BEACON),
            "deadline": FAR_DEADLINE,
        }),
        "Submission": message("ContributionLedger", "node", submission(2), {
            **submission_fields(submission(2)),
        }),
        "Outcomes": message("ContributionLedger", "validator 0", outcomes, {
            "batchId": 1, "batchRoot": hex0x(outcomes.batch_root),
            "recordsHash": hex0x(outcomes.records_hash),
        }),
        "ApiRequest": message("ContributionLedger", "node", request, {
            "audience": request.audience, "method": request.method, "path": request.path,
            "bodyHash": hex0x(request.body_hash), "nonce": hex0x(request.nonce),
            "issuedAt": request.issued_at,
        }),
        "Permit": permit(),
    }  # fmt: skip


def message(
    contract_name: str, signer: str, typed: Any, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a message with its hashes and a signature."""
    return signed(contract_name, signer, typed.TYPE, typed.struct_hash(), fields)


def permit() -> dict[str, Any]:
    """Return the ERC-2612 permit with which a worker onboards in one transaction."""
    spender, value = contract("StakeVault"), 1000 * 10**18
    words = (address_bytes(WORKER), address_bytes(spender), value, 0, FAR_DEADLINE)
    fields = {"owner": WORKER, "spender": spender, "value": uint(value), "nonce": 0}
    return signed(
        "MusterToken",
        "worker",
        PERMIT,
        struct_hash(PERMIT, *words),
        {**fields, "deadline": FAR_DEADLINE},
    )


def signed(
    contract_name: str, signer: str, type_: str, struct: Hash32, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what both languages must derive from a message."""
    hashed = digest(domain(contract_name), struct)
    return {
        "contract": contract_name,
        "type": type_,
        "fields": fields,
        "struct_hash": hex0x(struct),
        "digest": hex0x(hashed),
        "private_key": hex0x(key(signer)),
        "signer": address_of(key(signer)),
        "signature": hex0x(sign(hashed, key(signer))),
    }


# ------------------------------------------------------------------------------ batch


def submission(index: int) -> Submission:
    """Return the worker's submission for one slot."""
    hash_ = file_hash(f"file {index}".encode())
    return Submission(RunId(1), WORKER, Step(4), index, PolicyVersion(3), hash_, 16, 2048 + index)


def submission_fields(typed: Submission) -> dict[str, Any]:
    """Return the fields as Solidity names them."""
    return {
        "runId": typed.run_id,
        "worker": typed.worker,
        "step": typed.step,
        "index": typed.index,
        "policyVersion": typed.policy_version,
        "fileHash": hex0x(typed.file_hash),
        "rollouts": typed.rollouts,
        "units": typed.units,
    }


EXACT_FRAUD = Ruling(Verdict.FRAUD, Reason.WRONG_SEED)
VERDICTS = (
    (Verdict.ACCEPTED, Reason.NONE),
    (Verdict.INCOMPLETE, Reason.FILE_INCOMPLETE),
    (Verdict.REJECTED, Reason.LATE),
    (Verdict.FRAUD, Reason.TOPLOC_MISMATCH),
    (Verdict.ACCEPTED, Reason.NONE),
)


def record(index: int) -> OutcomeRecord:
    """Return the outcome of one submission of the batch."""
    judged, (verdict, reason) = submission(index), VERDICTS[index]
    return OutcomeRecord(
        worker_id=1,
        step=judged.step,
        index=judged.index,
        policy_version=judged.policy_version,
        file_hash=judged.file_hash,
        rollouts=judged.rollouts,
        units=judged.units,
        verdict=verdict,
        reason=reason,
    )


def batch() -> dict[str, Any]:
    """Return a batch from its submissions to the validators' signatures; five is an odd tree."""
    submissions = [submission(i) for i in range(len(VERDICTS))]
    records = [record(i) for i in range(len(VERDICTS))]
    committed_leaves = [s.leaf() for s in submissions]
    root = merkle.batch_root(committed_leaves)
    packed = pack_records(records)
    leaves = [r.leaf(1, i) for i, r in enumerate(records)]
    units = sum(s.units for s in submissions)
    price, at = (PRICE, 1), 1_700_000_000
    committed = Batch(1, RunId(1), root, NO_HASH, len(submissions), units, *price, at)
    posted = replace(
        committed,
        outcomes_root=merkle.merkle_root(leaves),
        posted_at=POSTED_AT,
        signers=0b11,
        status=BatchStatus.JUDGED,
    )
    withheld = replace(committed, posted_at=POSTED_AT, signers=0b11, status=BatchStatus.WITHHELD)
    outcomes = Outcomes(1, root, keccak(packed))
    hashed = digest(domain("ContributionLedger"), outcomes.struct_hash())
    unseen = Outcomes(1, root, keccak(b""))
    nothing = digest(domain("ContributionLedger"), unseen.struct_hash())
    return {
        "batch_id": 1,
        "run_id": 1,
        "headers": [header(committed), header(posted), header(withheld)],
        "submissions": [
            {
                "fields": submission_fields(s),
                "leaf": hex0x(s.leaf()),
                "proof": [hex0x(node) for node in merkle.batch_proof(committed_leaves, i)],
            }
            for i, s in enumerate(submissions)
        ],
        "batch_root": hex0x(root),
        "records": [
            {
                "record": hex0x(r.to_bytes()),
                "leaf": hex0x(leaves[i]),
                "is_exact_fraud": Ruling(r.verdict, r.reason).is_exact,
                "proof": [hex0x(node) for node in merkle.merkle_proof(leaves, i)],
                "worker_id": r.worker_id,
                "step": r.step,
                "index": r.index,
                "policy_version": r.policy_version,
                "file_hash": hex0x(r.file_hash),
                "rollouts": r.rollouts,
                "units": r.units,
                "verdict": int(r.verdict),
                "reason": int(r.reason),
            }
            for i, r in enumerate(records)
        ],
        "packed": hex0x(packed),
        "records_hash": hex0x(keccak(packed)),
        "outcomes_root": hex0x(merkle.merkle_root(leaves)),
        "outcomes_digest": hex0x(hashed),
        "validator_keys": [hex0x(k) for k in VALIDATORS],
        "signatures": hex0x(b"".join(sign(hashed, k) for k in VALIDATORS)),
        "withheld_signatures": hex0x(b"".join(sign(nothing, k) for k in VALIDATORS)),
    }


def header(typed: Batch) -> dict[str, Any]:
    """Return a batch's header and what the ledger keeps of it."""
    return {
        "batch_id": typed.batch_id,
        "run_id": typed.run_id,
        "root": hex0x(typed.root),
        "outcomes_root": hex0x(typed.outcomes_root),
        "count": typed.count,
        "units": typed.units,
        "price_per_unit": uint(typed.price_per_unit),
        "terms": typed.terms,
        "committed_at": typed.committed_at,
        "posted_at": typed.posted_at,
        "signers": typed.signers,
        "status": typed.status.number,
        "commitment": hex0x(typed.commitment()),
    }


# ----------------------------------------------------------------------------- juries

OPENED_AT = 1_700_000_000
"""When the cases below open; their times are seconds after, or before, that."""
JURY_CASES: tuple[dict[str, Any], ...] = (
    {"name": "five", "history": [(-9, i, True) for i in range(5)], "size": 3},
    {"name": "too few", "history": [(-9, i, True) for i in range(2)], "size": 5},
    {"name": "nobody", "history": [], "size": 3},
    {
        "name": "edges",
        # 1 left a second before, 2 in the second of the opening; 4 joined a second before, 5 in it.
        "history": [
            *((-9, i, True) for i in range(4)),
            *((-1, 1, False), (-1, 4, True)),
            *((0, 2, False), (0, 5, True)),
        ],
        "size": 6,
    },
    {
        "name": "some excluded",
        "history": [(-9, i, True) for i in range(8)],
        "size": 5,
        "excluded": (1, 3, 5, 99),
    },
    {
        "name": "few of many places",
        "history": [
            *((-9, i, True) for i in range(60)),
            *((-5, i, False) for i in range(60) if i % 10),
        ],
        "size": 7,
    },
)
"""Of a bench: who joined or left, and when, in the order of time."""


def jury() -> dict[str, Any]:
    """Return draws of juries, and what names and hides cases, claims and votes."""
    leaf, result, salt = keccak(b"outcome"), keccak(b"result"), keccak(b"salt")
    rulings = [Ruling(*each) for each in VERDICTS[:4]] + [EXACT_FRAUD]
    votes = [*rulings, None]
    return {
        "cases": [jury_case(**case) for case in JURY_CASES],
        "summons": [{"batch_id": i, "case_id": hex0x(summons_of(i))} for i in (1, 2**32 + 5)],
        "leaf": hex0x(leaf),
        "account": WORKER,
        "result_hash": hex0x(result),
        "salt": hex0x(salt),
        "claims": [
            {
                "verdict": int(each.verdict),
                "reason": int(each.reason),
                "ruling": each.number,
                "is_exact": each.is_exact,
                "announcement": hex0x(claim_announcement(WORKER, leaf, each, salt)),
            }
            for each in rulings
        ],
        "votes": [
            {
                "ruling": 0 if each is None else each.number,
                "commitment": hex0x(vote_commitment(leaf, WORKER, each, result, salt)),
            }
            for each in votes
        ],
    }


def jury_case(
    *,
    name: str,
    history: Sequence[tuple[int, int, bool]],
    size: int,
    excluded: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Return the draw of one case out of a bench that came to be in this way."""
    block_hash, case_id = keccak(f"block of {name}".encode()), keccak(f"case {name}".encode())
    seed = jury_seed(block_hash, case_id)
    left = {number: OPENED_AT + at for at, number, joins in history if not joins}
    places = [
        BenchPlace(juror(number), OPENED_AT + at, left.get(number, 0))
        for at, number, joins in history
        if joins
    ]
    out = [juror(number) for number in excluded]
    drawn = draw_jury(places, opened_at=OPENED_AT, size=size, seed=seed, excluded=out)
    return {
        "block_hash": hex0x(block_hash),
        "case_id": hex0x(case_id),
        "seed": hex0x(seed),
        "opened_at": OPENED_AT,
        "who": [juror(number) for _, number, _ in history],
        "when": [OPENED_AT + at for at, _, _ in history],
        "joins": [joins for _, _, joins in history],
        "places": len(places),
        "size": size,
        "excluded": out,
        "jurors": drawn,
    }


def juror(number: int) -> Address:
    """Return a juror's account."""
    return to_address(keccak(b"juror %d" % number)[12:])


# -------------------------------------------------------------------------- schedule

SCHEDULE_CASES = ((1, 1), (2, 3), (3, 12), (4, 88))
"""Batch ids, and how many validators are seated at the commitment."""
REAUDITS_SHOWN = 256
"""Batches of which the vectors say whether they are checked once more."""


def schedule_case(batch_id: int, validators: int) -> dict[str, Any]:
    """Return the order of a batch's validators, at its commitment and later, and which of many
    batches are re-audited.
    """
    beacon, root = keccak(b"block of batch %d" % batch_id), keccak(b"root %d" % batch_id)
    seed = schedule.batch_seed(beacon, RunId(7), batch_id, root)
    seated = [to_address(keccak(b"validator %d" % i)[12:]) for i in range(validators)]
    # One has left since, and three took their seats.
    newcomers = [to_address(keccak(b"newcomer %d" % i)[12:]) for i in range(3)]
    seated_now = [*seated[1:], *newcomers]
    many = [(i, schedule.batch_seed(beacon, RunId(7), i, root)) for i in range(REAUDITS_SHOWN)]
    return {
        "run_id": 7,
        "batch_id": batch_id,
        "beacon": hex0x(beacon),
        "root": hex0x(root),
        "seed": hex0x(seed),
        "seated": seated,
        "order": list(schedule.draw_order(seed, seated)),
        "seated_now": seated_now,
        "order_now": list(schedule.order_of_batch(seed, seated, seated_now)),
        "history_places": [schedule.place_of_history(seed, count) for count in range(1, 17)],
        "reaudited": [i for i, each in many if schedule.is_reaudited(each)],
    }


# --------------------------------------------------------------------------- checking


def checking() -> dict[str, Any]:
    """Return how a validator proves that it recomputed a submission: directions and messages."""
    beacon, leaf, root = keccak(b"beacon"), keccak(b"submission"), keccak(b"batch")
    seed = block_seed(WORKER, beacon, leaf, 2)
    hidden_TH = (np.arange(3 * 10, dtype=np.uint16) * 517 + 0x3F80).reshape(3, 10) % 0x7F00
    fingerprint = project(hidden_TH, seed)
    hashed = fingerprints_hash([fingerprint, b""])
    return {
        "validator": WORKER,
        "beacon": hex0x(beacon),
        "leaf": hex0x(leaf),
        "block": 2,
        "seed": hex0x(seed),
        "token_signs": balanced_signs(seed, 3).astype(int).tolist(),
        "channel_signs": channel_signs(seed, 10).astype(int).tolist(),
        "hidden_bfloat16": hidden_TH.tolist(),
        "fingerprint": hex0x(fingerprint),
        "lengths": [40, 30, 64, 5],
        "block_ends": [rows.stop for rows in split_blocks([40, 30, 64, 5])],
        "packed": hex0x(pack_fingerprints([fingerprint, b""])),
        "fingerprints_hash": hex0x(hashed),
        "checking": hex0x(Checking(7, root, keccak(b"records"), hashed).struct_hash()),
        "report": hex0x(CheckReport(7, root, WORKER, hashed, 2, 1).struct_hash()),
    }


# ------------------------------------------------------------------------------ trees


def tree(size: int) -> dict[str, Any]:
    """Return a tree over `size` leaves with every proof, and some of many leaves."""
    leaves = [keccak(f"leaf {i} of {size}".encode()) for i in range(size)]
    parts = (range(size), range(0, size, 2), range(size // 2, size), range(0, size, 5), (size - 1,))
    return {
        "leaves": [hex0x(leaf) for leaf in leaves],
        "root": hex0x(merkle.merkle_root(leaves)),
        "proofs": [[hex0x(n) for n in merkle.merkle_proof(leaves, i)] for i in range(size)],
        "multi_proofs": [
            {
                "positions": list(positions),
                "siblings": [hex0x(n) for n in merkle.merkle_multi_proof(leaves, positions)],
            }
            for positions in parts
        ],
    }


def main() -> None:
    """Write every vector file."""
    VECTORS.mkdir(exist_ok=True)
    for name, document in documents().items():
        (VECTORS / f"{name}.json").write_text(render(document))


if __name__ == "__main__":
    main()
