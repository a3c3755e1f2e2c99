"""What one RPC endpoint's answers prove about each other, by Ethereum's own hashes. Pure.

A block's hash is the Keccak-256 of its RLP-encoded header (Yellow Paper, section 4.4). The header
holds the root of a Merkle-Patricia trie over the block's receipts, which hold its logs. So a
block's hash fixes its events. No hash tells whether the block is on the chain that everybody else
follows: that takes a second endpoint, or a hash known from elsewhere.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256
from typing import Any

import rlp

from muster.client.audit.contradictions import Contradiction, Kind
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32

NEWEST_RECEIPT = 4
"""Newest known transaction type: receipts of later types may have another encoding."""
EMPTY_ROOT = keccak(rlp.encode(b""))
"""Root of a trie without entries."""


_DIGITS = re.compile("0x[0-9a-fA-F]*")
"""The only spelling of bytes and numbers: logs are compared by their text, and Python reads spaces,
underscores and signs too.
"""


def _digits(value: Any) -> str:
    if not _DIGITS.fullmatch(value):
        raise ValueError(f"{value[:80]!r} is not 0x and hexadecimal digits")
    return str(value[2:])


def _bytes(value: Any) -> bytes:
    return bytes.fromhex(_digits(value))


def _number(value: Any) -> bytes:
    number = int(_digits(value), 16)
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


_Field = tuple[str, Callable[[Any], bytes]]
_HEADER: tuple[_Field, ...] = (
    ("parentHash", _bytes),
    ("sha3Uncles", _bytes),
    ("miner", _bytes),
    ("stateRoot", _bytes),
    ("transactionsRoot", _bytes),
    ("receiptsRoot", _bytes),
    ("logsBloom", _bytes),
    ("difficulty", _number),
    ("number", _number),
    ("gasLimit", _number),
    ("gasUsed", _number),
    ("timestamp", _number),
    ("extraData", _bytes),
    ("mixHash", _bytes),
    ("nonce", _bytes),
)
_SINCE: tuple[_Field, ...] = (
    ("baseFeePerGas", _number),
    ("withdrawalsRoot", _bytes),
    ("blobGasUsed", _number),
    ("excessBlobGas", _number),
    ("parentBeaconBlockRoot", _bytes),
    ("requestsHash", _bytes),
)
"""Header fields that hard forks added, in order: EIP-1559, 4895, 4844 (two), 4788, 7685."""
HEADER_FIELDS = ("hash", *(name for name, _ in (*_HEADER, *_SINCE)))
"""Fields of a header that a dump keeps."""
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError)


def header_hash(header: Mapping[str, Any]) -> Hash32:
    """Return the hash of a block; raises EncodingError when the header is malformed."""
    try:
        fields = [encode(header[name]) for name, encode in _HEADER]
        fields += [encode(header[name]) for name, encode in _SINCE if header.get(name) is not None]
    except _MALFORMED as error:
        raise EncodingError(f"malformed block header: {error}") from error
    return keccak(rlp.encode(fields))


def receipts_root(receipts: Sequence[Mapping[str, Any]]) -> Hash32:
    """Return the root over a block's receipts; raises EncodingError when one is malformed, or of a
    type later than NEWEST_RECEIPT.
    """
    try:
        encoded = [_encode_receipt(receipt) for receipt in receipts]
    except _MALFORMED as error:
        raise EncodingError(f"malformed receipt: {error}") from error
    return trie_root({rlp.encode(place): value for place, value in enumerate(encoded)})


def _encode_receipt(receipt: Mapping[str, Any]) -> bytes:
    kind = int(receipt.get("type", "0x0"), 16)
    if kind > NEWEST_RECEIPT:
        raise EncodingError(f"a receipt of type {kind}, known are those up to {NEWEST_RECEIPT}")
    root = receipt.get("root")
    body = [
        _bytes(root) if root else _number(receipt["status"]),
        _number(receipt["cumulativeGasUsed"]),
        _bytes(receipt["logsBloom"]),
        [
            [
                _bytes(log["address"]),
                [_bytes(topic) for topic in log["topics"]],
                _bytes(log["data"]),
            ]
            for log in receipt["logs"]
        ],
    ]
    encoded: bytes = rlp.encode(body)
    return bytes([kind]) + encoded if kind else encoded


# The Merkle-Patricia trie (Yellow Paper, appendix D)


def trie_root(entries: Mapping[bytes, bytes]) -> Hash32:
    """Return the root of the trie that maps keys to values; no value is empty."""
    if not entries:
        return EMPTY_ROOT
    nibbles = {
        tuple(n for byte in key for n in (byte >> 4, byte & 15)): value
        for key, value in entries.items()
    }
    return keccak(rlp.encode(_node(nibbles, 0)))


def _node(entries: Mapping[tuple[int, ...], bytes], depth: int) -> list[Any]:
    """Return the node over keys that agree in their first `depth` nibbles."""
    keys = list(entries)
    if len(keys) == 1:
        return [_path(keys[0][depth:], is_leaf=True), entries[keys[0]]]
    shared = _shared(min(keys), max(keys), depth)
    if shared > depth:
        return [_path(keys[0][depth:shared], is_leaf=False), _child(entries, shared)]
    children: list[Any] = [b""] * 17
    for nibble in range(16):
        below = {k: v for k, v in entries.items() if len(k) > depth and k[depth] == nibble}
        if below:
            children[nibble] = _child(below, depth + 1)
    ends_here = [value for key, value in entries.items() if len(key) == depth]
    children[16] = ends_here[0] if ends_here else b""
    return children


def _shared(first: tuple[int, ...], last: tuple[int, ...], depth: int) -> int:
    """Return how many nibbles the first and the last key share, and so all keys between them."""
    while depth < min(len(first), len(last)) and first[depth] == last[depth]:
        depth += 1
    return depth


def _child(entries: Mapping[tuple[int, ...], bytes], depth: int) -> Any:
    """Return a node's encoding in its parent: the node if it is short, else its hash."""
    node = _node(entries, depth)
    encoded = rlp.encode(node)
    return node if len(encoded) < 32 else keccak(encoded)


def _path(nibbles: tuple[int, ...], *, is_leaf: bool) -> bytes:
    odd = len(nibbles) % 2
    flag = 2 * is_leaf + odd
    padded = (flag, *nibbles) if odd else (flag, 0, *nibbles)
    return bytes(16 * a + b for a, b in zip(padded[::2], padded[1::2], strict=True))


# Blocks


def check_header(header: Mapping[str, Any], number: int, stated: Hash32) -> list[Contradiction]:
    """Return what is wrong with a header that should have this number and hash."""
    found = header_hash(header)
    if found == stated and int(header["number"], 16) == number:
        return []
    what = f"the endpoint says its hash is {hex0x(stated)}, the header hashes to {hex0x(found)}"
    return [Contradiction(Kind.SOURCE_HEADER, what, block=number)]


def check_logs(
    header: Mapping[str, Any],
    receipts: Sequence[Mapping[str, Any]],
    shown: Collection[Mapping[str, Any]],
    addresses: Collection[str],
) -> list[Contradiction]:
    """Return what is wrong with a block's logs of `addresses` as an endpoint shows them."""
    number = int(header["number"], 16)
    root = receipts_root(receipts)
    if root != _bytes(header["receiptsRoot"]):
        what = (
            f"the receipts hash to {hex0x(root)}, the header's receipts root is "
            f"{header['receiptsRoot']}"
        )
        return [Contradiction(Kind.SOURCE_RECEIPTS, what, block=number)]
    proven, claimed = proven_logs(receipts, addresses), {log_key(log) for log in shown}
    return [
        Contradiction(Kind.SOURCE_LOGS, f"{what} log {index} of {address}", tx=tx, block=number)
        for what, keys in (
            ("the endpoint shows what no receipt has:", claimed - proven),
            ("the endpoint leaves out", proven - claimed),
        )
        for index, tx, address, *_ in sorted(keys)
    ]


LogKey = tuple[int, str, str, bytes]
"""A log's index in its block, transaction, address, and the hash of its topics and data."""


def log_key(log: Mapping[str, Any]) -> LogKey:
    """Return a log's identity, the same from any endpoint; raises EncodingError when malformed."""
    try:
        contents = [[topic.lower() for topic in log["topics"]], log["data"].lower()]
        place = int(log["logIndex"], 16)
        tx, address = log["transactionHash"].lower(), log["address"].lower()
        return place, tx, address, sha256(json.dumps(contents).encode()).digest()
    except _MALFORMED as error:
        raise EncodingError(f"malformed log: {error}") from error


def proven_logs(receipts: Sequence[Mapping[str, Any]], addresses: Collection[str]) -> set[LogKey]:
    """Return the logs of some contracts, numbered by their place in the block's receipts.

    The receipts root covers neither log indices nor transaction hashes. Indices are counted here;
    the transaction hash is taken from the receipt unproven (the transactions root could prove it).
    """
    found, place = set(), 0
    for receipt in receipts:
        for log in receipt["logs"]:
            if log["address"].lower() in addresses:
                numbered = {**log, "logIndex": hex(place)}
                numbered["transactionHash"] = receipt["transactionHash"]
                found.add(log_key(numbered))
            place += 1
    return found


def may_hold_logs_of(bloom: bytes, addresses: Collection[str]) -> bool:
    """Return whether a block's bloom filter allows logs of any of the addresses; there are no false
    negatives (Yellow Paper, section 4.4.1).
    """
    bits = int.from_bytes(bloom, "big")
    return any(bits & mask == mask for mask in map(_bloom_mask, addresses))


def _bloom_mask(address: str) -> int:
    hashed = keccak(_bytes(address))
    mask = 0
    for i in (0, 2, 4):
        mask |= 1 << (int.from_bytes(hashed[i : i + 2], "big") & 2047)
    return mask
