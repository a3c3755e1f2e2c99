"""Outcome records as calldata, as the ledger takes them, compared with blobs (EIP-4844).

    make bench-blobs

Calldata: real batches on Anvil, with three signatures, by the clients that the programs use. Blobs:
the same records in a real blob transaction to contracts/test/BlobOutcomes.sol, whose versioned hash
the contract reads; one record is then proven by point evaluation, as a dispute would require. A
posting without records is assumed to cost as much as one with a single record. Gas is exact, so one
run is enough; times are medians of five.

A record is 56 bytes: two field elements of 28, so that two evaluations prove it, and 2,048 records
fill a blob. EIP-7918 bounds what a blob costs: not less than 8,192 gas at the block's base fee.

Writes results/blobs.json.
"""

import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import ckzg
import eth_account.typed_transactions.blob_transactions as blob_transactions
from benchmarks.chain.gas_network import ALICE, Network, key_of, opened, record_of
from benchmarks.report import machine, print_table, write
from eth_abi.abi import encode
from eth_account import Account
from eth_utils.address import to_checksum_address

from muster.protocol.encoding import hex0x, keccak
from muster.protocol.ids import Address
from muster.protocol.messages import OutcomeRecord, pack_records

ROOT = Path(__file__).parents[2]
COUNTS = (1, 16, 100, 1000, 4096)
"""Submissions of a batch; the last is the most that the ledger takes."""
ROLLOUTS = (16, 256)
"""Rollouts of a submission: the demo's size, and that of INTELLECT-2's preset."""
ELEMENT_BYTES = OutcomeRecord.SIZE // 2
ELEMENTS = 4096
RECORDS_PER_BLOB = ELEMENTS // 2
GAS_PER_BLOB = 1 << 17
LEAST_GAS_PER_BLOB = 1 << 13
"""EIP-7918: BLOB_BASE_COST."""
MODULUS = 0x73EDA753299D7D483339D80809A1D80553BDA402FFFE5BFEFFFFFFFF00000001
"""Modulus of the scalar field of BLS12-381."""
GENERATOR = 7
SHOWN = 77
"""The record that is proven."""
GWEI = 10**9
SETUP = Path(blob_transactions.__file__).with_name("kzg_trusted_setup.txt")


@dataclass(frozen=True)
class Posting:
    """One batch's outcomes."""

    submissions: int
    """Their number."""
    gas: int
    """Gas of posting them as calldata."""
    calldata_bytes: int
    """Bytes of the transaction's calldata."""

    @property
    def blobs(self) -> int:
        """Blobs that its records fill."""
        return -(-self.submissions // RECORDS_PER_BLOB)


def main() -> None:
    """Measure, print the tables and write the result."""
    postings, figures = asyncio.run(measure())
    plain = postings[0].gas
    rows = [row_of(posting, plain) for posting in postings]
    print_table("posting the outcomes of a batch", list(rows[0]), [texts(row) for row in rows])
    print_table("beside it", ["what", "figure"], [[k, f"{v:,.4g}"] for k, v in figures.items()])
    last = rows[-1]
    metrics = {
        "calldata_per_submission_4096": last["calldata gas"] / last["submissions"],
        "blob_break_even_submissions": break_even(postings),
        **figures,
    }
    write("blobs", metrics, rows, measured_on=machine())


def row_of(posting: Posting, plain: int) -> dict[str, Any]:
    """Return a posting's line: gas, and the least that blobs could cost at the same base fee."""
    least = plain + posting.blobs * LEAST_GAS_PER_BLOB
    per = {
        f"calldata gas, {n} a submission": posting.gas / posting.submissions / n for n in ROLLOUTS
    }
    with_blobs = {f"blob gas equivalent, {n}": least / posting.submissions / n for n in ROLLOUTS}
    return {
        "submissions": posting.submissions,
        "calldata bytes": posting.calldata_bytes,
        "calldata gas": posting.gas,
        "blobs": posting.blobs,
        "blob gas": posting.blobs * GAS_PER_BLOB,
        "least with blobs": least,
        **per,
        **with_blobs,
    }


def texts(row: dict[str, Any]) -> list[str]:
    """Return a line's cells."""
    return [f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" for value in row.values()]


def break_even(postings: list[Posting]) -> float:
    """Return the number of submissions from which a blob at its lowest price is cheaper than
    calldata."""
    one, sixteen = postings[0], postings[1]
    each = (sixteen.gas - one.gas) / (sixteen.submissions - one.submissions)
    return 1 + LEAST_GAS_PER_BLOB / each


async def measure() -> tuple[list[Posting], dict[str, float]]:
    """Return the costs of postings, and of blobs and their proofs."""
    async with opened() as network:
        postings = [await _post(network, count) for count in COUNTS]
        return postings, await _blobs(network)


async def _post(network: Network, count: int) -> Posting:
    works = network.works(ALICE, count)
    batch_id, _ = await network.commit(works)
    network.note("posted", await network.post(batch_id, works, signers=3))
    size = await network.footprint("posted")
    return Posting(count, size.gas, size.zero_bytes + size.nonzero_bytes)


# ------------------------------------------------------------------------ blobs


async def _blobs(network: Network) -> dict[str, float]:
    setup = ckzg.load_trusted_setup(str(SETUP), 0)
    works = network.works(ALICE, RECORDS_PER_BLOB)
    blob = blob_of(pack_records([record_of(work, 1, fraud=False) for work in works]))
    commitment = ckzg.blob_to_kzg_commitment(blob, setup)
    sender = network.of("orchestrator").sender
    assert sender is not None
    created = await sender.send(None, bytecode())
    ledger = Address(to_checksum_address(created["contractAddress"]))
    posted = await _send_blob(network, ledger, blob)
    first, second = (evaluation(blob, 2 * SHOWN + i, commitment, setup) for i in (0, 1))
    data = selector("contradict(uint64,bytes,bytes)")
    data += encode(["uint64", "bytes", "bytes"], [1, first, second])
    shown = await sender.send(ledger, data)
    return {
        "blob_transaction_gas": int(posted["gasUsed"], 16),
        "blob_transaction_blob_gas": int(posted["blobGasUsed"], 16),
        "proof_of_a_record_gas": int(shown["gasUsed"], 16),
        "commitment_of_a_blob_ms": timed(lambda: ckzg.blob_to_kzg_commitment(blob, setup)),
        "proof_of_an_element_ms": timed(lambda: evaluation(blob, 2 * SHOWN, commitment, setup)),
    }


def blob_of(records: bytes) -> bytes:
    """Return a blob of records: 28 bytes in each field element."""
    parts = [records[n : n + ELEMENT_BYTES] for n in range(0, len(records), ELEMENT_BYTES)]
    return b"".join(part.rjust(32, b"\0") for part in parts).ljust(32 * ELEMENTS, b"\0")


def evaluation(blob: bytes, place: int, commitment: bytes, setup: Any) -> bytes:
    """Return the input of point evaluation that proves one field element."""
    reversed_place = int(f"{place:012b}"[::-1], 2)
    point = pow(pow(GENERATOR, (MODULUS - 1) // ELEMENTS, MODULUS), reversed_place, MODULUS)
    proof, value = ckzg.compute_kzg_proof(blob, point.to_bytes(32, "big"), setup)
    assert value == blob[32 * place : 32 * place + 32]
    versioned_hash = b"\1" + sha256(commitment).digest()[1:]
    return bytes(versioned_hash + point.to_bytes(32, "big") + value + commitment + proof)


async def _send_blob(network: Network, ledger: Address, blob: bytes) -> dict[str, Any]:
    chain = network.of("orchestrator")
    nonce = await chain.rpc.call("eth_getTransactionCount", chain.account, "latest")
    fields = {
        "type": 3,
        "chainId": chain.chain_id,
        "nonce": int(nonce, 16),
        "gas": 200_000,
        "maxFeePerGas": 10 * GWEI,
        "maxPriorityFeePerGas": GWEI,
        "maxFeePerBlobGas": GWEI,
        "value": 0,
        "to": ledger,
        "data": hex0x(selector("post(uint64,bytes32)") + encode(["uint64", "bytes32"], [1, b"r"])),
    }
    signed = Account.sign_transaction(fields, key_of("orchestrator"), blobs=[blob])
    sent = await chain.rpc.call("eth_sendRawTransaction", hex0x(bytes(signed.raw_transaction)))
    await chain.rpc.call("evm_mine")
    receipt: dict[str, Any] = await chain.rpc.call("eth_getTransactionReceipt", sent)
    assert receipt["status"] == "0x1", receipt
    return receipt


def bytecode() -> bytes:
    """Return the creation code of BlobOutcomes, compiled now."""
    forge = [str(ROOT / "tools" / "forge"), "build", "contracts/test/BlobOutcomes.sol", "--quiet"]
    subprocess.run([*forge, "--root", str(ROOT)], check=True, timeout=600)
    built = json.loads((ROOT / "out" / "BlobOutcomes.sol" / "BlobOutcomes.json").read_text())
    return bytes.fromhex(built["bytecode"]["object"][2:])


def selector(signature: str) -> bytes:
    """Return a function's selector."""
    return bytes(keccak(signature.encode())[:4])


def timed(work: Callable[[], object]) -> float:
    """Return the median of five runs, in milliseconds."""
    took = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return statistics.median(took) * 1000


if __name__ == "__main__":
    main()
