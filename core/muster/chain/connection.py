"""The connection to a chain: checks that it is the right one, and holds the typed clients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from eth_utils.address import to_checksum_address

from muster.chain.abi import CONTRACTS, EventTable, Receipt, artifact, contract_abi, decode_revert
from muster.chain.contracts import (
    ContributionLedger,
    DisputeCourt,
    FaultCourt,
    JuryPool,
    MusterToken,
    RewardEscrow,
    RunRegistry,
    StakeVault,
    WorkerRegistry,
)
from muster.chain.deployment import Deployment, load_deployment
from muster.chain.log_store import log_file
from muster.chain.quorum import open_rpc
from muster.chain.reader import logs_between
from muster.chain.rpc import (
    LatestBlock,
    RatePatience,
    Rpc,
    from_hex,
    garbled,
    hash_from_hex,
    is_revert,
    member,
)
from muster.chain.send_journal import JournalStore, SendJournal
from muster.chain.sender import SendPolicy, TransactionSender
from muster.protocol.eip712 import Domain, address_of
from muster.protocol.encoding import hex0x
from muster.protocol.errors import (
    ChainUnreachable,
    ConfigError,
    EncodingError,
    RpcError,
    WrongChain,
)
from muster.protocol.ids import Address, Hash32
from muster.settings.profiles import resolve

if TYPE_CHECKING:
    from web3 import AsyncWeb3
    from web3.contract import AsyncContract

logger = logging.getLogger(__name__)

_BEHIND_S = 1.0
"""Seconds to wait for contracts and blocks that an endpoint does not know."""


class Chain:
    """An EVM chain with Muster's contracts. Use `connect`, and close it."""

    def __init__(
        self,
        rpc: Rpc,
        deployment: Deployment,
        *,
        key: bytes | None = None,
        journal: SendJournal | None = None,
        policy: SendPolicy | None = None,
    ) -> None:
        self.rpc = rpc
        self.deployment = deployment
        self.chain_id = deployment.chain_id
        self.events = EventTable(deployment.contracts)
        self.sender: TransactionSender | None = None
        if key is not None:
            self.sender = TransactionSender(
                rpc, key, deployment.chain_id, journal=journal, policy=policy
            )
        self.log_file = log_file(deployment)
        self._block = "latest"
        self._label: str | None = None
        self._rehearses: Address | None = None
        self._add_clients()

    def _add_clients(self) -> None:
        self.token = MusterToken(self)
        self.vault = StakeVault(self)
        self.jurors = JuryPool(self)
        self.workers = WorkerRegistry(self)
        self.runs = RunRegistry(self)
        self.ledger = ContributionLedger(self)
        self.court = DisputeCourt(self)
        self.faults = FaultCourt(self)
        self.escrow = RewardEscrow(self)

    @classmethod
    async def connect(
        cls,
        rpc_url: str | Sequence[str] | None = None,
        deployments: Path | Deployment | None = None,
        *,
        key: bytes | None = None,
        journal: Path | None = None,
        timeout_s: float = 10.0,
    ) -> Self:
        """Return a checked connection; with a key, one that can send.

        The endpoint is an HTTP or WebSocket URL or the path of a node's socket; several, as a list
        or separated by commas, are compared (`muster.chain.quorum`). By default, endpoint and
        deployment are those of the network that `muster.settings.profiles` finds. A transaction is
        in the journal before it is sent, and survives the process. Raises ChainUnreachable when no
        endpoint answers, WrongChain when it serves another chain or there is no code at the
        recorded addresses, ConfigError without a deployment or while another process holds the
        journal.
        """
        if not rpc_url or deployments is None:
            _, found, folder = resolve(None, None)
            rpc_url, deployments = rpc_url or found, deployments or folder
        rpc = open_rpc(rpc_url, timeout_s=timeout_s)
        try:
            chain_id = from_hex(await rpc.call("eth_chainId"))
            deployment = (
                deployments
                if isinstance(deployments, Deployment)
                else load_deployment(deployments, chain_id)
            )
            await _check_deployment(rpc, chain_id, deployment)
            opened = None
            if key is not None and journal is not None:
                opened = await open_journal(rpc, chain_id, address_of(key), journal)
        except BaseException:
            await rpc.close()
            raise
        return cls(rpc, deployment, key=key, journal=opened)

    async def journal_in(self, store: JournalStore) -> None:
        """Send with this journal from now on: this process takes over from another one.

        The store is closed with the chain, or when another one takes its place.
        """
        journal = await open_journal(self.rpc, self.chain_id, self.me, store)
        assert self.sender is not None  # me
        self.sender = self.sender.with_journal(journal)

    def at(self, block: int) -> Chain:
        """Return the chain in its state after a block. It can only read; do not close it."""
        return self._changed(sender=None, _block=hex(block))

    def once(self, label: str) -> Chain:
        """Return the same chain for one write that happens only once, even if it is repeated.

        A write with this label that is pending or has succeeded, in this process or an earlier one
        with the same journal, is not sent again: its receipt is returned. Do not close the result.
        See `TransactionSender.send`.
        """
        return self._changed(_label=label)

    def rehearsed_by(self, account: Address) -> Chain:
        """Return the same chain for writes that are only estimated, as if sent by an account.

        A receipt has the estimated gas, no hash and no events. Do not close the result.
        """
        return self._changed(_rehearses=account)

    def _changed(self, **attributes: object) -> Chain:
        other = copy(self)
        vars(other).update(attributes)
        other._add_clients()
        return other

    async def receipt_of(self, label: str) -> Receipt | None:
        """Return the receipt of the write with this label; None while it has not happened."""
        found = await self.sender.receipt_of(label) if self.sender else None
        return None if found is None else await self._receipt(found)

    async def pending_transactions(self) -> int:
        """Return how many sent transactions of the account are not mined yet."""
        return await self.sender.pending_count() if self.sender else 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the session and the journal."""
        await self.rpc.close()
        if self.sender is not None:
            self.sender.close()

    @property
    def w3(self) -> AsyncWeb3[Any]:
        """web3.py over the same endpoint; middleware added to it sees our requests too."""
        return self.rpc.w3

    def contract(self, name: str) -> AsyncContract:
        """Return a contract as a web3.py object: with every function and event, untyped."""
        return self.w3.eth.contract(
            address=to_checksum_address(self.deployment.contracts[name]), abi=artifact(name)["abi"]
        )

    @property
    def account(self) -> Address | None:
        """The account that sends, if there is one."""
        return self.sender.address if self.sender else None

    @property
    def me(self) -> Address:
        """The account that sends; raises ConfigError without a key."""
        if self.sender is None:
            raise ConfigError("a chain without a key sends nothing", hint="pass --keystore")
        return self.sender.address

    async def allow(self, contract: str, wei: int) -> None:
        """Approve a contract for `wei` of the sender's tokens, unless its allowance is enough."""
        spender = self.deployment.contracts[contract]
        if wei and await self.token.allowance(self.me, spender) < wei:
            await self.token.approve(spender, wei)

    def domain(self, contract: str) -> Domain:
        """Return the EIP-712 domain of a contract, by name."""
        return Domain(self.chain_id, self.deployment.contracts[contract])

    async def latest_block(self) -> LatestBlock:
        """Return the chain's head."""
        return LatestBlock.from_rpc(await self.rpc.call("eth_getBlockByNumber", "latest", False))

    async def now(self) -> int:
        """Return the time of the latest block."""
        return (await self.latest_block()).timestamp

    async def deploy_hash(self) -> Hash32:
        """Return the hash of the block in which the contracts were deployed."""
        block = await self.rpc.call(
            "eth_getBlockByNumber", hex(self.deployment.deploy_block), False
        )
        return hash_from_hex(member(block, "hash"))

    async def longest_open_s(self) -> int:
        """Return the longest time in seconds from the commitment of work until its verdict is
        final, when every dispute is opened at once.
        """
        terms = await self.court.terms()
        windows_s = await self.ledger.outcome_deadline() + await self.ledger.challenge_window()
        return windows_s + terms.jury_time

    async def block_number(self) -> int:
        """Return the height of the latest block."""
        return from_hex(await self.rpc.call("eth_blockNumber"))

    async def units_split_off(self, batch_id: int, *, after: int) -> int:
        """Return the units that workers took out of a batch in the blocks after one, in those that
        are not confirmed, too.
        """
        events = contract_abi("ContributionLedger").events
        topic = next(event.topic for event in events if event.name == "BatchSplit")
        query = {
            "address": self.deployment.contracts["ContributionLedger"],
            "topics": [topic, None, f"0x{batch_id:064x}"],
        }
        logs = logs_between(self.rpc, query, after + 1, await self.block_number())
        splits = [self.events.decode(log, 0) async for log in logs]
        return sum(split.args["work"].submission.units for split in splits if split is not None)

    async def read(self, contract: str, function: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the result of a view."""
        return self._decoded(
            contract, function, await self._answer(self._call_of(contract, function, args))
        )

    async def read_all(
        self, contract: str, function: str, calls: Sequence[Sequence[Any]]
    ) -> list[tuple[Any, ...]]:
        """Return the results of a view for each of these arguments, in few RPC exchanges."""
        answers = await self.rpc.batch(
            [("eth_call", [self._call_of(contract, function, args), self._block]) for args in calls]
        )
        return [self._decoded(contract, function, answer) for answer in answers]

    def _call_of(self, contract: str, function: str, args: Sequence[Any]) -> dict[str, str]:
        data = contract_abi(contract).functions[function].encode(args)
        return {"to": self.deployment.contracts[contract], "data": hex0x(data)}

    def _decoded(self, contract: str, function: str, answer: Any) -> tuple[Any, ...]:
        try:
            return contract_abi(contract).functions[function].decode(bytes.fromhex(answer[2:]))
        except (EncodingError, ValueError, TypeError) as error:
            raise WrongChain(
                f"{contract}.{function} gave an impossible answer: {error}",
                hint="check that --deployments has the contracts of this chain",
            ) from error

    async def _answer(self, call: dict[str, str]) -> Any:
        patience = RatePatience(_BEHIND_S)
        while True:
            answer = await self._run("eth_call", call, self._block)
            # Every view returns something. Several nodes may be behind one address, and a node that
            # is starting or lagging does not know the contract yet.
            if answer != "0x" or not await patience.waits():
                return answer

    async def _run(self, method: str, call: dict[str, str], *more: str) -> Any:
        try:
            return await self.rpc.call(method, call, *more)
        except RpcError as error:
            if is_revert(error):
                raise decode_revert(error.data) from error
            raise

    async def write(self, contract: str, function: str, args: Sequence[Any]) -> Receipt:
        """Send a transaction and return its receipt; raises ContractRevert, TransactionLost."""
        to = self.deployment.contracts[contract]
        data = contract_abi(contract).functions[function].encode(args)
        if self._rehearses is not None:
            call = {"from": self._rehearses, "to": to, "data": hex0x(data)}
            gas = from_hex(await self._run("eth_estimateGas", call))
            return Receipt(tx_hash="", block_number=0, gas_used=gas, events=[])
        if self.sender is None:
            raise ConfigError(
                f"{contract}.{function} needs a key to sign with", hint="pass --keystore"
            )
        return await self._receipt(await self.sender.send(to, data, label=self._label))

    async def _receipt(self, receipt: Any) -> Receipt:
        logs = receipt["logs"]
        time = None
        if logs and not (isinstance(logs[0], dict) and "blockTimestamp" in logs[0]):
            time = await self._time_of(receipt["blockHash"])
        try:
            events = [self.events.decode(log, time) for log in logs]
        except EncodingError as error:
            raise garbled(f"the receipt of {receipt['transactionHash']}: {error}") from error
        gas = from_hex(member(receipt, "gasUsed"))
        price, l1_fee = (
            from_hex(receipt.get(name) or "0x0") for name in ("effectiveGasPrice", "l1Fee")
        )
        return Receipt(
            tx_hash=receipt["transactionHash"],
            block_number=from_hex(receipt["blockNumber"]),
            gas_used=gas,
            events=[event for event in events if event is not None],
            cost_wei=gas * price + l1_fee,
        )

    async def _time_of(self, block_hash: str) -> int:
        """Return the time of a transaction's block; 0 if the endpoint does not tell it: what is
        mined must not look like a failure.
        """
        patience = RatePatience(_BEHIND_S)
        while True:
            try:
                block = await self.rpc.call("eth_getBlockByHash", block_hash, False)
                return from_hex(member(block, "timestamp"))
            except (ChainUnreachable, RpcError) as error:
                logger.debug("no time of a block", extra={"cause": str(error)})
            if not await patience.waits():
                return 0


async def open_journal(
    rpc: Rpc, chain_id: int, account: Address, store: JournalStore | Path
) -> SendJournal:
    """Return the journal of an account on the chain that an endpoint serves."""
    # A restarted development chain has the same id, but other transactions.
    genesis = await rpc.call("eth_getBlockByNumber", "0x0", False)
    first = str(member(genesis, "hash"))
    return SendJournal.of(store, chain_id=chain_id, genesis=first, account=account)


async def _check_deployment(rpc: Rpc, chain_id: int, deployment: Deployment) -> None:
    if chain_id != deployment.chain_id:
        raise WrongChain(
            f"{rpc.masked_url} serves chain {chain_id}, the contracts are on {deployment.chain_id}",
            hint="give an endpoint and contracts of one chain with --rpc and --deployments, "
            "or with --network",
        )
    patience = RatePatience(_BEHIND_S)
    while True:
        codes = await rpc.batch(
            [("eth_getCode", [deployment.contracts[name], "latest"]) for name in CONTRACTS]
        )
        empty = [n for n, code in zip(CONTRACTS, codes, strict=True) if len(str(code or "")) <= 2]
        if not empty:
            return
        # Several nodes may be behind one address, and one may lack the newest blocks, or be in the
        # middle of a reorganisation.
        if not await patience.waits():
            raise WrongChain(
                f"there is no code at the recorded address of {', '.join(empty)}",
                hint="the chain may have been restarted: deploy the contracts again",
            )
