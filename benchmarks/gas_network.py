"""A network on a real Anvil whose every operation is a transaction of `muster.chain`'s clients.

`measure` returns what each operation took: its gas, calldata and the 21,000 of a transaction
included, and the sizes that fees for data go by. The network is in use already. The operations are
those of contracts/test/Gas.t.sol, and what else a run sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pyarrow

from muster.chain import (
    Chain,
    ChainView,
    Deployment,
    EventReader,
    Receipt,
    RunConfig,
    RunTerms,
    apply_poll,
)
from muster.chain.outgoing import Unsigned
from muster.chain.view_parts import BatchView
from muster.deploy import DeployParameters, deploy_contracts
from muster.devnet.anvil import Anvil
from muster.protocol.chain_fees import Footprint, fastlz_length
from muster.protocol.eip712 import address_of, digest, sign, struct_hash
from muster.protocol.encoding import address_bytes, keccak
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.jury import vote_commitment
from muster.protocol.merkle import merkle_root
from muster.protocol.messages import (
    NodeRegistration,
    OutcomeRecord,
    Outcomes,
    Reason,
    Submission,
    Verdict,
    pack_records,
)

TOKEN = 10**18
BATCH = 64
"""Submissions in the batch that the issue's figure is about."""
ROLLOUTS = 16
"""Rollouts in each."""
UNITS = 1000
DAY = 24 * 3600
PARAMETERS = DeployParameters(
    challenge_window_s=DAY,
    outcome_deadline_s=DAY // 4,
    vote_commit_s=DAY // 3,
    vote_reveal_s=DAY // 6,
    slash_pause_s=DAY // 2,
    unbonding_s=7 * DAY,
    change_delay_s=3 * DAY,
    stake_per_unit=TOKEN // 10**6,
)
PERMIT = "Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"
FOREVER = 2**40
BROTLI_LEVEL = 1
"""Nitro's since ArbOS 20 (arbos/arbosState/arbosstate.go)."""
NO_RUN = RunId(0)
SALT, RESULT = keccak(b"salt"), keccak(b"result")


def key_of(name: str) -> bytes:
    """Return a person's private key."""
    return keccak(b"gas: " + name.encode())


VALIDATORS = sorted((f"validator {i}" for i in range(5)), key=lambda name: address_of(key_of(name)))
"""Ascending by address, as their signatures must be."""
ALICE, BOB, CAROL = "alice", "bob", "carol"
PEOPLE = ("owner", "orchestrator", "trainer", "challenger", *VALIDATORS, ALICE, BOB, CAROL)


@dataclass
class Network:
    """Everybody's connection, and the gas of what they did."""

    deployment: Deployment
    chains: dict[str, Chain]
    run: RunId = NO_RUN
    gas: dict[str, int] = field(default_factory=dict)
    transactions: dict[str, str] = field(default_factory=dict)
    """The hash of each operation's transaction."""
    _view: ChainView = field(default_factory=ChainView)
    _reader: EventReader | None = None
    _next_index: int = 0

    def of(self, name: str) -> Chain:
        """Return a person's connection."""
        return self.chains[name]

    def address(self, name: str) -> Address:
        """Return a person's, or a contract's, address."""
        return self.deployment.contracts.get(name) or address_of(key_of(name))

    def note(self, operation: str, receipt: Receipt) -> Receipt:
        """Keep what an operation cost."""
        self.gas[operation] = receipt.gas_used
        self.transactions[operation] = receipt.tx_hash
        return receipt

    async def footprint(self, operation: str) -> Footprint:
        """Return the gas and the sizes of an operation's transaction."""
        sent = self.transactions[operation]
        raw = await self.of("owner").rpc.call("eth_getRawTransactionByHash", sent)
        return footprint_of(bytes.fromhex(raw[2:]), self.gas[operation])

    async def pass_time(self, seconds: int) -> None:
        """Mine a block so much later."""
        rpc = self.of("owner").rpc
        await rpc.call("evm_increaseTime", seconds)
        await rpc.call("evm_mine")

    async def batch(self, batch_id: int) -> BatchView:
        """Return a batch as its events tell it."""
        self._reader = self._reader or EventReader(self.of("owner"))
        apply_poll(self._view, await self._reader.poll())
        return self._view.batches[batch_id]

    # -------------------------------------------------------------------- opening

    async def open(self) -> None:
        """Stake validators, register two workers, fund a run and settle one of each kind."""
        for name in PEOPLE:
            await self.of(name).token.faucet(self.address(name), 100_000 * TOKEN)
        for name in VALIDATORS:
            stake = PARAMETERS.required_validator_stake
            await self.of(name).token.approve(self.address("StakeVault"), stake)
            await self.of(name).vault.deposit(self.address(name), stake)
        for name in (ALICE, BOB):
            await self.onboard(name)
        await self._create_run()
        challenger = self.of("challenger")
        await challenger.token.approve(self.address("DisputeCourt"), 2**256 - 1)
        await self._settle_one_of_each()

    async def onboard(self, name: str) -> Receipt:
        """Register a worker in one transaction."""
        chain, node, stake = self.of(name), f"node of {name}", PARAMETERS.required_worker_stake
        consent = NodeRegistration(self.address(name), self.address(node), 0, FOREVER)
        signature = self.sign("WorkerRegistry", consent.struct_hash(), node)
        permit = await self._permit(name, stake)
        return await chain.workers.register_with_permit(
            stake, self.address(node), FOREVER, signature, FOREVER, *permit
        )

    async def _permit(self, owner: str, wei: int) -> tuple[int, Hash32, Hash32]:
        token, address = self.of(owner).token, self.address(owner)
        parties = address_bytes(address), address_bytes(self.address("StakeVault"))
        hashed = struct_hash(PERMIT, *parties, wei, await token.nonces(address), FOREVER)
        separator = await token.domain_separator()
        signature = sign(keccak(b"\x19\x01" + separator + hashed), key_of(owner))
        return signature[64], Hash32(signature[:32]), Hash32(signature[32:64])

    async def _create_run(self) -> None:
        owner = self.of("owner")
        config = RunConfig(
            self.address("trainer"),
            self.address("orchestrator"),
            *(keccak(name.encode()) for name in ("model", "tasks", "recipe", "calibration")),
            terms=RunTerms(TOKEN // 10**6, 100_000, 500_000, 2),
            validators=tuple(self.address(name) for name in VALIDATORS),
        )
        self.run, created = await owner.runs.create_run(config)
        self.note("create_run", created)
        approved = await owner.token.approve(self.address("RewardEscrow"), 1000 * TOKEN)
        self.note("approve", approved)
        self.note("fund", await owner.escrow.fund(self.run, 1000 * TOKEN))

    async def _settle_one_of_each(self) -> None:
        works = self.works(BOB, 2)
        batch = await self.judge(works, frauds=(1,))
        await self.execute_fraud(batch, works, 1)
        disputed = await self.judge(self.works(BOB, 1))
        await self.of("challenger").court.challenge(disputed.prove(0), Verdict.REJECTED)
        await self.pass_time(PARAMETERS.challenge_window_s)
        await self.of(BOB).escrow.claim([batch.claim([0])])

    # ----------------------------------------------------------------------- work

    def sign(self, contract: str, struct: Hash32, signer: str) -> bytes:
        """Return a signature of typed data."""
        return sign(digest(self.of("owner").domain(contract), struct), key_of(signer))

    def works(self, worker: str, count: int) -> list[Submission]:
        """Return submissions for slots that nothing was submitted for before."""
        first, self._next_index = self._next_index, self._next_index + count
        return [
            Submission(
                run_id=self.run,
                worker=self.address(worker),
                step=Step(1),
                index=index,
                policy_version=PolicyVersion(0),
                file_hash=keccak(b"file %d" % index),
                rollouts=ROLLOUTS,
                units=UNITS,
            )
            for index in range(first, first + count)
        ]

    async def commit(self, works: Sequence[Submission]) -> tuple[int, Receipt]:
        """Commit a batch; return its number."""
        root = merkle_root([work.leaf() for work in works])
        units = sum(work.units for work in works)
        ledger = self.of("orchestrator").ledger
        return await ledger.commit_batch(self.run, root, len(works), units)

    async def post(
        self, batch_id: int, works: Sequence[Submission], signers: int, frauds: Sequence[int] = ()
    ) -> Receipt:
        """Post outcomes, all accepted but those at some places."""
        chain = self.of("orchestrator")
        numbers = {
            work.worker: (await chain.workers.worker_of(work.worker)).worker_id for work in works
        }
        records = [
            record_of(work, numbers[work.worker], fraud=place in frauds)
            for place, work in enumerate(works)
        ]
        packed = pack_records(records)
        header = (await self.batch(batch_id)).header()
        outcomes = Outcomes(batch_id, header.root, keccak(packed)).struct_hash()
        names = VALIDATORS[:signers]
        signatures = [self.sign("ContributionLedger", outcomes, name) for name in names]
        return await chain.ledger.post_outcomes(header, packed, b"".join(signatures))

    async def judge(
        self, works: Sequence[Submission], *, signers: int = 2, frauds: Sequence[int] = ()
    ) -> BatchView:
        """Commit and post."""
        batch_id, _ = await self.commit(works)
        await self.post(batch_id, works, signers, frauds)
        return await self.batch(batch_id)

    async def execute_fraud(
        self, batch: BatchView, works: Sequence[Submission], position: int
    ) -> Receipt:
        """Slash the worker at a place of a batch."""
        work = works[position]
        node = next(f"node of {n}" for n in (ALICE, BOB) if self.address(n) == work.worker)
        signature = self.sign("ContributionLedger", work.struct_hash(), node)
        ledger = self.of("orchestrator").ledger
        return await ledger.execute_fraud(batch.prove(position), work, signature)

    # ----------------------------------------------------------------- measurement

    async def measure(self) -> None:
        """Do everything once, and keep what it cost."""
        self.note("onboard", await self.onboard(CAROL))
        for count in (1, 16, BATCH, 256):
            await self._measure_batch(count)
        await self._measure_direct()
        await self._measure_checkpoints()
        await self._measure_claims()
        await self._measure_claims_of_batches()
        await self._measure_case()
        await self._measure_fraud()
        await self._measure_stake()

    async def _measure_batch(self, count: int) -> None:
        works = self.works(ALICE, count)
        batch_id, committed = await self.commit(works)
        posted = await self.post(batch_id, works, signers=3)
        both = committed.gas_used + posted.gas_used
        self.gas[f"per_rollout_{count * ROLLOUTS}"] = round(both / (count * ROLLOUTS))
        self.note(f"post_outcomes_{count}", posted)
        if count == BATCH:
            self.note("commit_batch", committed)

    async def _measure_direct(self) -> None:
        (work,) = self.works(CAROL, 1)
        signature = self.sign("ContributionLedger", work.struct_hash(), "node of carol")
        call = self.of(CAROL).write("ContributionLedger", "submitDirect", [work, signature])
        self.note("submit_direct", await call)

    async def _measure_checkpoints(self) -> None:
        runs = self.of("trainer").runs
        for version in (0, 1):
            root = Hash32(keccak(b"policy %d" % version))
            published = await runs.publish_checkpoint(self.run, PolicyVersion(version), root)
        self.note("publish_checkpoint", published)
        await self.of("owner").rpc.call("evm_mine")
        recorded = self.of("trainer").write("RunRegistry", "recordBeacon", [self.run, 1])
        self.note("record_beacon", await recorded)

    async def _measure_claims_of_batches(self) -> None:
        batches = [await self.judge(self.works(ALICE, 1)) for _ in range(16)]
        await self.pass_time(PARAMETERS.challenge_window_s)
        claims = [batch.claim([0]) for batch in batches]
        self.note("claim_16_batches", await self.of(ALICE).escrow.claim(claims))

    async def _measure_claims(self) -> None:
        works = self.works(ALICE, BATCH)
        rejected = await self.judge(self.works(BOB, BATCH), frauds=(BATCH - 1,))
        batch = await self.judge(works)
        await self.pass_time(PARAMETERS.challenge_window_s)
        escrow = self.of(ALICE).escrow
        self.note("claim_first", await escrow.claim([batch.claim([0])]))
        self.note("claim_one", await escrow.claim([batch.claim([1])]))
        many = self.note("claim_16", await escrow.claim([batch.claim(range(2, 18))]))
        self.gas["claim_further"] = round((many.gas_used - self.gas["claim_one"]) / 15)
        recovery = [rejected.claim([BATCH - 1])]
        recovered = await self.of(ALICE).write("RewardEscrow", "recover", [recovery])
        self.note("recover_one", recovered)

    async def _measure_case(self) -> None:
        batch = await self.judge(self.works(ALICE, BATCH))
        outcome, court = batch.prove(0), self.of("challenger").court
        leaf = Hash32(
            self.note("challenge", await court.challenge(outcome, Verdict.REJECTED))
            .event("CaseOpened")
            .args["leaf"]
        )
        blocks = PARAMETERS.draw_delay_blocks + 1
        await self.of("owner").rpc.call("anvil_mine", hex(blocks))
        drawn = self.note("draw_jury", await court.draw_jury(outcome))
        drawn_addresses = drawn.event("JuryDrawn").args["jurors"]
        jury = [name for name in VALIDATORS if self.address(name) in drawn_addresses]
        for name in jury:
            vote = vote_commitment(leaf, self.address(name), True, RESULT, SALT)
            self.note("commit_vote", await self.of(name).court.commit_vote(leaf, vote))
        for name in jury:
            revealed = await self.of(name).court.reveal_vote(leaf, True, RESULT, SALT)
            self.note("reveal_vote", revealed)
        self.note("close_case", await court.close(outcome))

    async def _measure_fraud(self) -> None:
        works = self.works(ALICE, BATCH)
        batch = await self.judge(works, frauds=(BATCH - 1,))
        self.note("execute_fraud", await self.execute_fraud(batch, works, BATCH - 1))
        await self.pass_time(PARAMETERS.challenge_window_s)
        ledger = self.of("orchestrator").ledger
        self.note("finalise_fraud", await ledger.finalise_fraud(batch.prove(BATCH - 1)))

    async def _measure_stake(self) -> None:
        vault = self.of(VALIDATORS[0]).vault
        permit = await self._permit(VALIDATORS[0], TOKEN)
        self.note("deposit", await vault.deposit_with_permit(TOKEN, FOREVER, *permit))
        self.note("request_unbond", await vault.request_unbond(TOKEN))
        await self.pass_time(PARAMETERS.unbonding_s)
        self.note("withdraw", await vault.withdraw())


def record_of(work: Submission, number: int, *, fraud: bool) -> OutcomeRecord:
    """Return the outcome of a submission by the worker of a number."""
    return OutcomeRecord(
        worker_id=number,
        step=work.step,
        index=work.index,
        policy_version=work.policy_version,
        file_hash=work.file_hash,
        rollouts=work.rollouts,
        units=work.units,
        verdict=Verdict.FRAUD if fraud else Verdict.ACCEPTED,
        reason=Reason.TOPLOC_MISMATCH if fraud else Reason.NONE,
    )


def footprint_of(raw: bytes, gas: int) -> Footprint:
    """Return what a signed transaction takes."""
    calldata = Unsigned.from_raw(raw).data
    zeros = calldata.count(0)
    brotli = pyarrow.Codec("brotli", compression_level=BROTLI_LEVEL)
    return Footprint(
        gas=gas,
        zero_bytes=zeros,
        nonzero_bytes=len(calldata) - zeros,
        fastlz_bytes=fastlz_length(raw),
        brotli_bytes=len(brotli.compress(raw, asbytes=True)),
    )


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Network]:
    """Yield a network that is in use, on a chain of its own."""
    async with contextlib.AsyncExitStack() as stack:
        anvil = await stack.enter_async_context(Anvil(block_time_s=DAY))
        deployment = await deploy_contracts(anvil.rpc_url, Anvil.key(0), PARAMETERS)
        network = Network(deployment, {})
        for name in PEOPLE:
            await anvil.set_balance(network.address(name), 10**24)
            chain = await Chain.connect(anvil.rpc_url, deployment, key=key_of(name))
            network.chains[name] = await stack.enter_async_context(chain)
        await network.open()
        yield network


async def measure() -> tuple[dict[str, int], dict[str, Footprint]]:
    """Return the gas of every operation, and what each transaction took, on a chain of its own."""
    async with opened() as network:
        await network.measure()
        return network.gas, {name: await network.footprint(name) for name in network.transactions}
