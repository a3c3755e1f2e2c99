"""A network on a real Anvil whose every operation is a transaction of `muster.chain`'s clients.

`measure` returns each operation's gas, including calldata and the 21,000 of a transaction, and the
sizes that decide data fees. The network is already in use, so storage is warm. The operations are
those of contracts/test/Gas.t.sol and the other transactions of a run.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pyarrow

from muster.app.anvil import Anvil
from muster.chain import (
    Chain,
    ChainView,
    Deployment,
    EventReader,
    LeasedWork,
    Receipt,
    RunConfig,
    RunTerms,
    apply_poll,
)
from muster.chain.outgoing import UnsignedTransaction
from muster.chain.structs import CommittedWork
from muster.chain.view_parts import BatchView
from muster.client.stake import join_bench, join_run, take_seat
from muster.deploy import DeployParameters, deploy_contracts
from muster.lab.economics.chain_fees import Footprint, fastlz_length
from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId, Step
from muster.protocol.jury import Ruling, claim_announcement, summons_of, vote_commitment
from muster.protocol.merkle import batch_proof, batch_root
from muster.protocol.messages import (
    OutcomeRecord,
    Outcomes,
    Reason,
    Submission,
    Ticket,
    Verdict,
    pack_records,
)
from muster.wallet import Wallet

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
    change_delay_s=4 * DAY,
    stake_per_unit=TOKEN // 10**6,
)
BROTLI_LEVEL = 1
"""Nitro's since ArbOS 20 (arbos/arbosState/arbosstate.go)."""
NO_RUN = RunId(0)
TERMS = 1
"""The number of the run's terms: it never changes them."""
SALT, RESULT = keccak(b"salt"), keccak(b"result")
REJECTED = Ruling(Verdict.REJECTED, Reason.TOPLOC_MISMATCH)


def key_of(name: str) -> bytes:
    """Return a person's private key."""
    return keccak(b"gas: " + name.encode())


def node_of(worker: str) -> str:
    """Return the name of a worker's node."""
    return f"node of {worker}"


VALIDATORS = sorted((f"validator {i}" for i in range(5)), key=lambda name: address_of(key_of(name)))
"""Ascending by address, as their signatures must be."""
JURORS = tuple(f"juror {i}" for i in range(5))
ALICE, BOB, CAROL = "alice", "bob", "carol"
WORKERS = (ALICE, BOB, CAROL)
PEOPLE = ("owner", "orchestrator", "trainer", "claimant", *VALIDATORS, *JURORS, *WORKERS)
SOURCES = ["https://files.example.org"]
"""Sources that workers and claimants name."""


@dataclass
class Network:
    """Everybody's connection, and the gas of their transactions."""

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
        """Store the gas of an operation."""
        self.gas[operation] = receipt.gas_used
        self.transactions[operation] = receipt.tx_hash
        return receipt

    async def footprint(self, operation: str) -> Footprint:
        """Return the gas and the sizes of an operation's transaction."""
        sent = self.transactions[operation]
        raw = await self.of("owner").rpc.call("eth_getRawTransactionByHash", sent)
        return footprint_of(bytes.fromhex(raw[2:]), self.gas[operation])

    async def pass_time(self, seconds: int) -> None:
        """Mine a block `seconds` later."""
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
        """Create and fund a run, seat its validators and the bench, and settle one of each kind."""
        for name in PEOPLE:
            await self.of(name).token.faucet(self.address(name), 100_000 * TOKEN)
        await self._create_run()
        # Twice the required stake: a validator that is fined below must keep its seat.
        stake = 2 * PARAMETERS.required_validator_stake
        for name in VALIDATORS:
            self.note("take_seat", await take_seat(self.of(name), self.run, TERMS, stake))
        for name in JURORS:
            stake = PARAMETERS.required_juror_stake
            self.note("join_bench", await join_bench(self.of(name), stake))
        # A case draws only jurors that joined the bench in an earlier second.
        await self.pass_time(1)
        for name in (ALICE, BOB):
            await self.onboard(name)
        for name in ("claimant", *WORKERS):
            await self.of(name).token.approve(self.address("DisputeCourt"), 2**256 - 1)
        await self._settle_one_of_each()

    async def onboard(self, name: str) -> Receipt:
        """Make a worker of the run in one transaction, with permit and its node's consent."""
        worker, node = (Wallet(address_of(key), key) for key in map(key_of, (name, node_of(name))))
        stake = PARAMETERS.required_worker_stake
        return await join_run(self.of(name), worker, node, self.run, stake)

    async def _create_run(self) -> None:
        owner = self.of("owner")
        config = RunConfig(
            self.address("trainer"),
            self.address("orchestrator"),
            keccak(b"model"),
            keccak(b"tasks"),
            keccak(b"recipe"),
            keccak(b"calibration"),
            RunTerms(TOKEN // 10**6, 100_000, 500_000, quorum=2),
            tuple(self.address(name) for name in VALIDATORS),
        )
        self.run, created = await owner.runs.create_run(config)
        self.note("create_run", created)
        approved = await owner.token.approve(self.address("RewardEscrow"), 1000 * TOKEN)
        self.note("approve", approved)
        self.note("fund", await owner.escrow.fund(self.run, 1000 * TOKEN))

    async def _settle_one_of_each(self) -> None:
        works = self.works(BOB, 4)
        direct = await self.direct(BOB)
        batch = await self.judge(works, frauds=(1,))
        await self.execute_fraud(batch, works, 1)
        await self._decide(batch, works, 2)
        await self.claim(batch, works, 3)
        await self.summon_and_settle(BOB, direct)
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
        root = batch_root([work.leaf() for work in works])
        units = sum(work.units for work in works)
        ledger = self.of("orchestrator").ledger
        return await ledger.commit_batch(self.run, root, len(works), units)

    async def post(
        self, batch_id: int, works: Sequence[Submission], signers: int, frauds: Sequence[int] = ()
    ) -> Receipt:
        """Post outcomes, all accepted but those at some places."""
        chain = self.of("orchestrator")
        numbers = {work.worker: (await chain.workers.worker_of(work.worker))[0] for work in works}
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
        held, ledger = self.held(works, position), self.of("orchestrator").ledger
        return await ledger.execute_fraud(batch.prove(position), held)

    def held(self, works: Sequence[Submission], position: int) -> CommittedWork:
        """Return the work at a place of a batch, signed and proven."""
        siblings = tuple(batch_proof([work.leaf() for work in works], position))
        return CommittedWork(works[position], self.signed(works[position]), siblings)

    def signed(self, work: Submission) -> bytes:
        """Return the signature of the worker's node."""
        worker = next(name for name in WORKERS if self.address(name) == work.worker)
        return self.sign("ContributionLedger", work.struct_hash(), node_of(worker))

    async def leased(self, work: Submission) -> LeasedWork:
        """Return a submission with its ticket, and both signatures."""
        ticket = Ticket(
            run_id=self.run,
            worker=work.worker,
            step=work.step,
            index=work.index,
            policy_version=work.policy_version,
            policy_root=keccak(b"policy 0"),
            beacon=keccak(b"beacon"),
            deadline=await self.of("owner").now() + 60,
        )
        signature = self.sign("ContributionLedger", ticket.struct_hash(), "orchestrator")
        return LeasedWork(work, self.signed(work), ticket, signature)

    # ---------------------------------------------------------------------- court

    async def direct(self, name: str) -> BatchView:
        """Have a worker submit by itself, with a bond."""
        (work,) = self.works(name, 1)
        ledger = self.of(name).ledger
        submitted = await ledger.submit_direct(await self.leased(work), SOURCES)
        self.note("submit_direct", submitted)
        return await self.batch(submitted.event("BatchCommitted").args["batch_id"])

    async def claim(self, batch: BatchView, works: Sequence[Submission], position: int) -> Hash32:
        """Put a bond on another ruling than the recorded one; return the case."""
        court, proof = self.of("claimant").court, batch.prove(position)
        leaf = batch.leaves()[position]
        said = claim_announcement(self.address("claimant"), leaf, REJECTED, SALT)
        self.note("announce", await court.announce(said))
        held = self.held(works, position)
        self.note("claim_case", await court.claim(proof, held, REJECTED.number, SALT, SOURCES))
        return leaf

    async def vote(self, case_id: Hash32, ruling: Ruling) -> str:
        """Draw a jury, all of which votes for one ruling; return one of the jurors."""
        await self.of("owner").rpc.call("anvil_mine", hex(PARAMETERS.draw_delay_blocks + 1))
        drawn = self.note("draw", await self.of("claimant").court.draw(case_id))
        on_jury = drawn.event("JuryDrawn").args["jurors"]
        jury = [name for name in JURORS if self.address(name) in on_jury]
        for name in jury:
            vote = vote_commitment(case_id, self.address(name), ruling, RESULT, SALT)
            self.note("commit_vote", await self.of(name).court.commit_vote(case_id, vote))
        for name in jury:
            court = self.of(name).court
            revealed = await court.reveal_vote(case_id, ruling.number, RESULT, SALT)
            self.note("reveal_vote", revealed)
        return jury[0]

    async def collect(self, case_id: Hash32, juror: str) -> None:
        """Pay a juror its fee."""
        court = self.of(juror).court
        self.note("collect_fee", await court.collect_fee(case_id, self.address(juror)))

    async def _decide(self, batch: BatchView, works: Sequence[Submission], position: int) -> None:
        """Have an outcome overturned, and everybody paid or fined for it."""
        case_id = await self.claim(batch, works, position)
        juror = await self.vote(case_id, REJECTED)
        court, proof = self.of("claimant").court, batch.prove(position)
        self.note("settle_case", await court.settle(proof))
        await self.collect(case_id, juror)
        signer = self.address(VALIDATORS[0])
        self.note("fine_signer", await court.fine_signer(proof, signer))

    async def summon_and_settle(self, name: str, batch: BatchView) -> None:
        """Have judges of the network decide about work that the run left unjudged."""
        await self.pass_time(PARAMETERS.outcome_deadline_s)
        work, court = batch.direct, self.of(name).court
        assert work is not None  # its worker submitted it
        self.note("summon", await court.summon(batch.header(), work, SOURCES))
        case_id = summons_of(batch.batch_id)
        juror = await self.vote(case_id, Ruling(Verdict.ACCEPTED, Reason.NONE))
        self.note("settle_summoned", await court.settle_summoned(batch.header(), work))
        await self.collect(case_id, juror)

    # ----------------------------------------------------------------- measurement

    async def measure(self) -> None:
        """Do every operation once, and store its gas."""
        self.note("onboard", await self.onboard(CAROL))
        for count in (1, 16, BATCH, 256):
            await self._measure_batch(count)
        await self._measure_checkpoints()
        await self._measure_unjudged()
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

    async def _measure_unjudged(self) -> None:
        """Measure work that the run leaves unjudged: one submission is split off and void, one is
        judged in the end."""
        works = self.works(ALICE, BATCH)
        batch_id, _ = await self.commit(works)
        direct = await self.direct(CAROL)
        await self.pass_time(PARAMETERS.outcome_deadline_s)
        batch = await self.batch(batch_id)
        proof = batch_proof([work.leaf() for work in works], 0)
        leased = await self.leased(works[0])
        split = await self.of(ALICE).ledger.split_off(batch.header(), leased, 0, proof, SOURCES)
        self.note("split_off", split)
        await self.summon_and_settle(CAROL, direct)
        await self.pass_time(PARAMETERS.challenge_window_s)
        ledger = self.of("orchestrator").ledger
        voided = await ledger.void_batch((await self.batch(batch_id)).header())
        self.note("void_batch", voided)
        own = (await self.batch(split.event("BatchSplit").args["batch_id"])).header()
        await ledger.void_batch(own)
        self.note("return_bond", await self.of(ALICE).court.return_bond(own))

    async def _measure_checkpoints(self) -> None:
        runs = self.of("trainer").runs
        for version in (0, 1):
            root = Hash32(keccak(b"policy %d" % version))
            published = await runs.publish_checkpoint(self.run, PolicyVersion(version), root)
        self.note("publish_checkpoint", published)

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
        works = self.works(ALICE, BATCH)
        await self._decide(await self.judge(works), works, 0)

    async def _measure_fraud(self) -> None:
        works = self.works(ALICE, BATCH)
        batch = await self.judge(works, frauds=(BATCH - 1,))
        self.note("execute_fraud", await self.execute_fraud(batch, works, BATCH - 1))
        await self.pass_time(PARAMETERS.challenge_window_s)
        ledger = self.of("orchestrator").ledger
        self.note("finalise_fraud", await ledger.finalise_fraud(batch.prove(BATCH - 1)))

    async def _measure_stake(self) -> None:
        chain, owner = self.of(ALICE), self.address(ALICE)
        await chain.token.approve(self.address("StakeVault"), TOKEN)
        self.note("deposit", await chain.vault.deposit(self.run, owner, TOKEN))
        self.note("request_unbond", await chain.vault.request_unbond(self.run, TOKEN))
        await self.pass_time(PARAMETERS.unbonding_s)
        self.note("withdraw", await chain.vault.withdraw(self.run))


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
    """Return the footprint of a signed transaction."""
    calldata = UnsignedTransaction.from_raw(raw).data
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
