"""A chain in memory behind a fake transport, and logs made from event arguments."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eth_abi.abi import encode
from eth_utils.abi import collapse_if_tuple

from muster.chain import Deployment, Event
from muster.chain.abi import ARTIFACTS, CONTRACTS, contract_abi, snake_case
from muster.chain.conversion import SolidityEnum
from muster.chain.rpc import Rpc
from muster.protocol.encoding import keccak
from muster.protocol.errors import RpcError
from muster.protocol.ids import Address, Hash32, to_address

CHAIN_ID = 31337
TX = "0x" + "ab" * 32
EMITTERS = {e.name: contract for contract in CONTRACTS for e in contract_abi(contract).events}
"""The contract of each event."""


def address(number: int) -> Address:
    return to_address(number.to_bytes(20, "big"))


DEPLOYMENT = Deployment(
    chain_id=CHAIN_ID,
    deploy_block=1,
    contracts={name: address(0xC0DE00 + i) for i, name in enumerate(CONTRACTS)},
)


def abi_entries(contract: str, kind: str) -> list[dict[str, Any]]:
    document = json.loads((ARTIFACTS / f"{contract}.json").read_text())
    return [entry for entry in document["abi"] if entry["type"] == kind]


def event_abi(contract: str, name: str) -> dict[str, Any]:
    return next(e for e in abi_entries(contract, "event") if e["name"] == name)


def plain(value: Any) -> Any:
    """Return a struct's fields as the tuple that eth_abi takes, and an enum as its number."""
    if isinstance(value, SolidityEnum):
        return list(type(value)).index(value)
    if dataclasses.is_dataclass(value):
        return tuple(plain(getattr(value, f.name)) for f in dataclasses.fields(value))
    return value


def encode_log(contract: str, name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return address, topics and data of an event, encoded by eth_abi."""
    abi = event_abi(contract, name)
    types = [collapse_if_tuple(p) for p in abi["inputs"]]
    signature = keccak(f"{name}({','.join(types)})".encode())
    topics, data_types, data = [signature], [], []
    for parameter, kind in zip(abi["inputs"], types, strict=True):
        value = plain(args[snake_case(parameter["name"])])
        if parameter["indexed"]:
            topics.append(Hash32(encode([kind], [value])))
        else:
            data_types.append(kind)
            data.append(value)
    return {
        "address": DEPLOYMENT.contracts[contract].lower(),
        "topics": ["0x" + topic.hex() for topic in topics],
        "data": "0x" + encode(data_types, data).hex(),
    }


def deposit(owner: int, amount: int = 1) -> dict[str, Any]:
    args = {"run_id": 1, "owner": address(owner), "amount": amount, "active": amount}
    return encode_log("StakeVault", "Deposited", args)


def owners(events: list[Event]) -> list[int]:
    return [int(event.args["owner"], 16) for event in events]


def placed(log: dict[str, Any], block: Block, index: int, *, timed: bool = True) -> dict[str, Any]:
    """Return a log as JSON-RPC answers it."""
    time = {"blockTimestamp": hex(block.timestamp)} if timed else {}
    return {
        **log,
        **time,
        "blockNumber": hex(block.number),
        "blockHash": "0x" + block.hash.hex(),
        "logIndex": hex(index),
        "transactionHash": TX,
        "removed": False,
    }


@dataclass
class Block:
    number: int
    hash: bytes
    timestamp: int
    logs: list[dict[str, Any]] = field(default_factory=list)
    parent: bytes = bytes(32)

    @property
    def bloom(self) -> str:
        """The bloom filter of the logs, set bit by bit as in the yellow paper."""
        bits = bytearray(256)
        for log in self.logs:
            for entry in (log["address"], *log["topics"]):
                digest = keccak(bytes.fromhex(entry[2:]))
                for at in (0, 2, 4):
                    bit = (digest[at] << 8 | digest[at + 1]) % 2048
                    bits[255 - bit // 8] |= 1 << bit % 8
        return "0x" + bits.hex()

    def to_json(self) -> dict[str, Any]:
        return {
            "number": hex(self.number),
            "hash": "0x" + self.hash.hex(),
            "parentHash": "0x" + self.parent.hex(),
            "logsBloom": self.bloom,
            "timestamp": hex(self.timestamp),
            "baseFeePerGas": hex(10**9),
        }


class FakeNode:
    """Answers JSON-RPC from a list of blocks; methods can be replaced and failures injected."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.salt = 0
        self.timed_logs = True
        self.max_range = 10**9
        self.calls: list[str] = []
        self.failures: list[Exception] = []
        self._interruption: tuple[int, Callable[[], object]] | None = None
        self.methods: dict[str, Callable[..., Any]] = {
            "eth_chainId": lambda: hex(CHAIN_ID),
            "eth_blockNumber": lambda: hex(len(self.blocks) - 1),
            "eth_getBlockByNumber": self._block_by_number,
            "eth_getBlockByHash": self._block_by_hash,
            "eth_getLogs": self._logs,
            "eth_getBlockReceipts": self._receipts,
        }
        self.mine()

    log_file: Path | None = None
    timeout_s = 10.0
    """Seconds in which a client repeats a failed request."""

    @property
    def rpc(self) -> Rpc:
        return Rpc("http://node", post=self, timeout_s=self.timeout_s)

    @property
    def deployment(self) -> Deployment:
        return DEPLOYMENT

    # ------------------------------------------------------------------- blocks

    def mine(self, *logs: dict[str, Any]) -> Block:
        number = len(self.blocks)
        parent = self.blocks[-1].hash if self.blocks else b""
        digest = keccak(parent + bytes([self.salt]) + json.dumps(logs).encode())
        block = Block(number, digest, 1000 + number, list(logs), parent or bytes(32))
        self.blocks.append(block)
        return block

    def reorganise(self, depth: int) -> None:
        """Drop the newest blocks; the next blocks have other hashes."""
        del self.blocks[len(self.blocks) - depth :]
        self.salt = (self.salt + 1) % 256

    def interrupt(self, interruption: Callable[[], object], *, after: int = 0) -> None:
        """Run a callback once, before the request that follows `after` others; an earlier callback
        that still waits runs now.
        """
        if self._interruption is not None:
            self._interruption[1]()
        self._interruption = after, interruption

    # ------------------------------------------------------------------ methods

    def _block_by_number(self, number: str, _full: bool) -> Any:
        at = len(self.blocks) - 1 if number == "latest" else int(number, 16)
        return self.blocks[at].to_json() if 0 <= at < len(self.blocks) else None

    def _block_by_hash(self, digest: str, _full: bool) -> Any:
        found = [block for block in self.blocks if "0x" + block.hash.hex() == digest]
        return found[0].to_json() if found else None

    def _logs(self, query: dict[str, Any]) -> Any:
        first, last = int(query["fromBlock"], 16), int(query["toBlock"], 16)
        if last - first + 1 > self.max_range:
            raise RpcError("query exceeds max block range", code=-32005)
        wanted = {a.lower() for a in query["address"]}
        return [
            placed(log, block, index, timed=self.timed_logs)
            for block in self.blocks[first : last + 1]
            for index, log in enumerate(block.logs)
            if log["address"].lower() in wanted
        ]

    def _receipts(self, number: str) -> Any:
        if int(number, 16) >= len(self.blocks):
            return None
        block = self.blocks[int(number, 16)]
        return [
            {"logs": [placed(log, block, index, timed=False)]}
            for index, log in enumerate(block.logs)
        ]

    # ---------------------------------------------------------------- transport

    async def __call__(self, body: bytes) -> bytes:
        if self._interruption is not None:
            wait, interruption = self._interruption
            self._interruption = wait - 1, interruption
            if wait <= 0:
                self._interruption = None
                interruption()
        if self.failures:
            raise self.failures.pop(0)
        request = json.loads(body)
        if isinstance(request, list):
            return json.dumps([self._answer(one) for one in request]).encode()
        return json.dumps(self._answer(request)).encode()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(request["method"])
        head = {"jsonrpc": "2.0", "id": request["id"]}
        method = self.methods.get(request["method"])
        if method is None:
            return {**head, "error": {"code": -32601, "message": "method not found"}}
        try:
            return {**head, "result": method(*request["params"])}
        except RpcError as error:
            problem: dict[str, Any] = {"code": error.code, "message": str(error)}
            if error.data:
                problem["data"] = "0x" + error.data.hex()
            return {**head, "error": problem}


@dataclass
class History:
    """Makes events one after the other, each in a block of its own unless told otherwise."""

    events: list[Event] = field(default_factory=list)
    block: int = 1
    log_index: int = 0

    def add(self, name: str, /, *, same_block: bool = False, **args: Any) -> Event:
        if self.events and not same_block:
            self.block, self.log_index = self.block + 1, -1
        self.log_index = self.log_index + 1 if self.events else 0
        event = Event(
            contract=EMITTERS[name],
            name=name,
            args=args,
            block_number=self.block,
            block_hash=keccak(b"block" + self.block.to_bytes(8, "big")),
            block_timestamp=1000 + self.block,
            log_index=self.log_index,
            tx_hash=f"0x{self.block:032x}{self.log_index:032x}",
        )
        self.events.append(event)
        return event
