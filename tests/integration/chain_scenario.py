"""A small network on a real Anvil, step by step, for the tests of muster.chain and muster audit."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from muster.app.anvil import Anvil
from muster.chain import (
    Chain,
    ChainView,
    Deployment,
    EventReader,
    LeasedWork,
    OutcomeProof,
    RunConfig,
    RunTerms,
    apply_poll,
)
from muster.chain.rpc import Rpc
from muster.chain.structs import ZERO_ADDRESS, CommittedWork
from muster.client.stake import join_bench, join_run, take_seat
from muster.deploy import DeployParameters, deploy_contracts
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
PRICE = 10**12
FRAUD_PPM = 100_000
EXACT_FRAUD_PPM = 250_000
WINDOW_S = 20
PARAMETERS = DeployParameters(
    challenge_window_s=WINDOW_S,
    vote_commit_s=20,
    vote_reveal_s=10,
    outcome_deadline_s=60,
    unbonding_s=200,
    change_delay_s=200,
    activation_delay_blocks=1,
    jail_time_s=5,
)
NO_RUN = RunId(0)
SALT = keccak(b"salt")
ACCEPT = Ruling(Verdict.ACCEPTED, Reason.NONE)
REJECT = Ruling(Verdict.REJECTED, Reason.SCHEMA)
CONVICT = Ruling(Verdict.FRAUD, Reason.TOPLOC_MISMATCH)


@dataclass(frozen=True)
class Person:
    key: bytes

    @property
    def address(self) -> Address:
        return address_of(self.key)

    @property
    def wallet(self) -> Wallet:
        return Wallet(self.address, self.key)


OWNER, ORCHESTRATOR, TRAINER, CHALLENGER = (Person(Anvil.key(i)) for i in range(4))
VALIDATORS = tuple(Person(Anvil.key(i)) for i in (4, 5, 6))
HONEST, CHEATER = Person(Anvil.key(7)), Person(Anvil.key(8))
JURORS = tuple(Person(keccak(b"juror %d" % i)) for i in range(4))


def node_of(worker: Person) -> Person:
    return Person(keccak(b"node of" + worker.key))


@dataclass
class Scenario:
    """A deployed network with everybody's connection."""

    anvil: Anvil
    deployment: Deployment
    chains: dict[Address, Chain] = field(default_factory=dict)
    run_id: RunId = NO_RUN
    committed: dict[Hash32, Sequence[Submission]] = field(default_factory=dict)
    """Submissions of the batches that were committed, by root."""

    def of(self, person: Person) -> Chain:
        return self.chains[person.address]

    @property
    def rpc(self) -> Rpc:
        return self.of(OWNER).rpc

    async def pass_time(self, seconds: int) -> None:
        await self.rpc.call("evm_increaseTime", seconds)
        await self.rpc.call("evm_mine")

    async def view(self) -> ChainView:
        view = ChainView()
        apply_poll(view, await EventReader(self.of(OWNER)).poll())
        return view

    # ------------------------------------------------------------------ actions

    async def join(self, worker: Person, stake: int = 100 * TOKEN) -> None:
        """Make somebody a worker of the run."""
        chain = self.of(worker)
        await chain.token.faucet(worker.address, stake)
        _, bound = await chain.workers.worker_of(worker.address)
        node = node_of(worker).wallet if bound == ZERO_ADDRESS else None
        await join_run(chain, worker.wallet, node, self.run_id, stake)

    async def sit(self, validator: Person) -> None:
        """Have somebody take a seat of the run."""
        chain, stake = self.of(validator), PARAMETERS.required_validator_stake
        await chain.token.faucet(validator.address, stake)
        _, terms = await chain.runs.terms_of(self.run_id)
        await take_seat(chain, self.run_id, terms, stake)

    async def offer(self, juror: Person) -> None:
        """Have somebody join the bench of the network's jurors."""
        chain, stake = self.of(juror), PARAMETERS.required_juror_stake
        await self.anvil.set_balance(juror.address, TOKEN)
        await chain.token.faucet(juror.address, stake)
        await join_bench(chain, stake)

    async def put_up_bond(self, person: Person) -> None:
        chain = self.of(person)
        await chain.token.faucet(person.address, PARAMETERS.bond)
        court = self.deployment.contracts["DisputeCourt"]
        allowed = await chain.token.allowance(person.address, court)
        await chain.token.approve(court, allowed + PARAMETERS.bond)

    def config(self) -> RunConfig:
        return RunConfig(
            TRAINER.address,
            ORCHESTRATOR.address,
            keccak(b"model"),
            keccak(b"tasks"),
            keccak(b"recipe"),
            keccak(b"calibration"),
            RunTerms(PRICE, FRAUD_PPM, EXACT_FRAUD_PPM, 2),
            tuple(v.address for v in VALIDATORS),
        )

    async def create_run(self) -> None:
        """Create a run with money, a policy and all its validators."""
        chain = self.of(OWNER)
        self.run_id, _ = await chain.runs.create_run(self.config())
        await chain.token.approve(self.deployment.contracts["RewardEscrow"], 10 * TOKEN)
        await chain.escrow.fund(self.run_id, 10 * TOKEN)
        for validator in VALIDATORS:
            await self.sit(validator)
        trainer = self.of(TRAINER)
        await trainer.runs.publish_checkpoint(self.run_id, PolicyVersion(0), keccak(b"root 0"))

    def submission(self, worker: Person, index: int, units: int = 1000) -> Submission:
        return Submission(
            run_id=self.run_id,
            worker=worker.address,
            step=Step(1),
            index=index,
            policy_version=PolicyVersion(0),
            file_hash=keccak(worker.key + bytes([index])),
            rollouts=8,
            units=units,
        )

    async def commit(self, submissions: Sequence[Submission]) -> int:
        root = batch_root([s.leaf() for s in submissions])
        self.committed[root] = submissions
        units = sum(s.units for s in submissions)
        ledger = self.of(ORCHESTRATOR).ledger
        batch_id, _ = await ledger.commit_batch(self.run_id, root, len(submissions), units)
        return batch_id

    def signed_outcomes(self, batch_id: int, root: Hash32, packed: bytes, signer: Person) -> bytes:
        message = Outcomes(batch_id, root, keccak(packed))
        domain = self.of(OWNER).domain("ContributionLedger")
        return sign(digest(domain, message.struct_hash()), signer.key)

    async def post(
        self,
        batch_id: int,
        submissions: Sequence[Submission],
        records: list[OutcomeRecord],
        signers: Sequence[Person] = VALIDATORS[:2],
        sender: Person = ORCHESTRATOR,
    ) -> None:
        """Post a quorum's outcomes; without records the batch is withheld."""
        root = batch_root([s.leaf() for s in submissions])
        packed = pack_records(records) if records else b""
        ordered = sorted(signers, key=lambda signer: int(signer.address, 16))
        signatures = [self.signed_outcomes(batch_id, root, packed, each) for each in ordered]
        header = (await self.view()).batches[batch_id].header()
        await self.of(sender).ledger.post_outcomes(header, packed, b"".join(signatures))

    async def judge(self, submission: Submission, record: OutcomeRecord) -> int:
        """Commit a submission and post its outcome; return the batch."""
        batch_id = await self.commit([submission])
        await self.post(batch_id, [submission], [record])
        return batch_id

    async def proof(self, batch_id: int, position: int) -> OutcomeProof:
        return (await self.view()).batches[batch_id].prove(position)

    def node_signature(self, submission: Submission, worker: Person) -> bytes:
        domain = self.of(OWNER).domain("ContributionLedger")
        return sign(digest(domain, submission.struct_hash()), node_of(worker).key)

    def held(self, outcome: OutcomeProof, submission: Submission, worker: Person) -> CommittedWork:
        """Return a submission, signed, with the siblings of an outcome's place in its batch."""
        leaves = [s.leaf() for s in self.committed.get(outcome.batch.root, ())]
        siblings = tuple(batch_proof(leaves, outcome.position)) if leaves else ()
        return CommittedWork(submission, self.node_signature(submission, worker), siblings)

    async def work(self, submission: Submission, worker: Person) -> LeasedWork:
        """Return a submission with everything that proves it."""
        ticket = Ticket(
            run_id=submission.run_id,
            worker=submission.worker,
            step=submission.step,
            index=submission.index,
            policy_version=submission.policy_version,
            policy_root=keccak(b"root 0"),
            beacon=keccak(b"beacon"),
            deadline=await self.of(OWNER).now() + 60,
        )
        domain = self.of(OWNER).domain("ContributionLedger")
        signature = sign(digest(domain, ticket.struct_hash()), ORCHESTRATOR.key)
        return LeasedWork(submission, self.node_signature(submission, worker), ticket, signature)

    async def submit_direct(self, submission: Submission, worker: Person) -> int:
        """Commit a submission without the orchestrator, with a bond; return the batch."""
        await self.put_up_bond(worker)
        work = await self.work(submission, worker)
        receipt = await self.of(worker).ledger.submit_direct(work, [])
        return int(receipt.event("BatchCommitted").args["batch_id"])

    async def split_off(
        self, batch_id: int, submissions: Sequence[Submission], position: int, worker: Person
    ) -> int:
        """Split off a submission from a batch that is due; return its own batch."""
        await self.put_up_bond(worker)
        header = (await self.view()).batches[batch_id].header()
        proof = batch_proof([s.leaf() for s in submissions], position)
        work = await self.work(submissions[position], worker)
        receipt = await self.of(worker).ledger.split_off(header, work, position, proof, [])
        return int(receipt.event("BatchCommitted").args["batch_id"])

    # -------------------------------------------------------------------- cases

    async def claim(
        self,
        proof: OutcomeProof,
        submission: Submission,
        worker: Person,
        ruling: Ruling,
        claimant: Person = CHALLENGER,
        *,
        proves: bool = True,
    ) -> Hash32:
        """Put a bond on a ruling; return the case."""
        chain = self.of(claimant)
        await self.put_up_bond(claimant)
        leaf = (await chain.ledger.standing_of(proof)).leaf
        announcement = claim_announcement(claimant.address, leaf, ruling, SALT)
        await chain.court.announce(announcement)
        work = self.held(proof, submission, worker)
        if not proves:
            work = replace(work, proof=())
        await chain.court.claim(proof, work, ruling.number, SALT, [])
        return leaf

    async def summon(self, batch_id: int, submission: Submission, worker: Person) -> Hash32:
        """Call judges of the network for a batch of one submission; return the case."""
        header = (await self.view()).batches[batch_id].header()
        await self.of(worker).court.summon(header, submission, [])
        return summons_of(batch_id)

    async def judge_by_jury(
        self, batch_id: int, submission: Submission, worker: Person, ruling: Ruling
    ) -> None:
        """Have a jury of the network judge work that the run left unjudged."""
        case_id = await self.summon(batch_id, submission, worker)
        await self.vote(case_id, dict.fromkeys(await self.draw(case_id), ruling))
        header = (await self.view()).batches[batch_id].header()
        await self.of(OWNER).court.settle_summoned(header, submission)

    async def draw(self, case_id: Hash32) -> list[Person]:
        """Draw a case's jury."""
        await self.rpc.call("anvil_mine", hex(PARAMETERS.draw_delay_blocks + 1))
        await self.of(OWNER).court.draw(case_id)
        drawn = (await self.view()).cases[case_id].jurors
        return [juror for address in drawn for juror in JURORS if juror.address == address]

    async def vote(self, case_id: Hash32, votes: Mapping[Person, Ruling | None]) -> None:
        """Commit and reveal votes."""
        result = keccak(b"result")
        for juror, ruling in votes.items():
            commitment = vote_commitment(case_id, juror.address, ruling, result, SALT)
            await self.of(juror).court.commit_vote(case_id, commitment)
        case = (await self.view()).cases[case_id]
        if len(votes) < len(case.jurors):
            await self.pass_time(PARAMETERS.vote_commit_s)
        for juror, ruling in votes.items():
            number = 0 if ruling is None else ruling.number
            await self.of(juror).court.reveal_vote(case_id, number, result, SALT)

    async def dispute(
        self, proof: OutcomeProof, submission: Submission, worker: Person, ruling: Ruling
    ) -> Hash32:
        """Have a jury of the network overturn an outcome; return the case."""
        case_id = await self.claim(proof, submission, worker, ruling)
        jury = await self.draw(case_id)
        await self.vote(case_id, dict.fromkeys(jury, ruling))
        await self.of(OWNER).court.settle(proof)
        return case_id


def record(
    worker_id: int, submission: Submission, verdict: Verdict, reason: Reason
) -> OutcomeRecord:
    return OutcomeRecord(
        worker_id=worker_id,
        step=submission.step,
        index=submission.index,
        policy_version=submission.policy_version,
        file_hash=submission.file_hash,
        rollouts=submission.rollouts,
        units=submission.units,
        verdict=verdict,
        reason=reason,
    )


def accepted(worker_id: int, submission: Submission) -> OutcomeRecord:
    return record(worker_id, submission, Verdict.ACCEPTED, Reason.NONE)


def fraud(worker_id: int, submission: Submission) -> OutcomeRecord:
    return record(worker_id, submission, Verdict.FRAUD, Reason.WRONG_SEED)


def rejected(worker_id: int, submission: Submission) -> OutcomeRecord:
    return record(worker_id, submission, Verdict.REJECTED, Reason.SCHEMA)


_BUILT: dict[bool, tuple[str, Deployment, RunId]] = {}
"""Chains without and with a run: the state to load, and their content."""


@contextlib.asynccontextmanager
async def network(*, with_run: bool = True, block_time_s: float = 1) -> AsyncIterator[Scenario]:
    """Start a chain with the contracts, jurors, a funded run, its validators and two workers."""
    if with_run not in _BUILT:
        _BUILT[with_run] = await _build(with_run)
    state, deployment, run_id = _BUILT[with_run]
    async with Anvil(block_time_s=block_time_s) as anvil:
        async with Rpc(anvil.rpc_url) as rpc:
            assert await rpc.call("anvil_loadState", state)
        async with _connected(anvil, deployment) as scenario:
            scenario.run_id = run_id
            if with_run:
                # Workers are active in the block after next; jurors judge cases that open a second
                # later.
                await scenario.pass_time(1)
                await scenario.pass_time(1)
            yield scenario


async def _build(with_run: bool) -> tuple[str, Deployment, RunId]:
    """Make a chain once for all tests of a process: to load it takes a third of the time."""
    async with Anvil() as anvil:
        deployment = await deploy_contracts(anvil.rpc_url, OWNER.key, PARAMETERS)
        async with _connected(anvil, deployment) as scenario:
            if with_run:
                for juror in JURORS:
                    await scenario.offer(juror)
                await scenario.create_run()
                await scenario.join(HONEST)
                await scenario.join(CHEATER)
            return await scenario.rpc.call("anvil_dumpState"), deployment, scenario.run_id


@contextlib.asynccontextmanager
async def _connected(anvil: Anvil, deployment: Deployment) -> AsyncIterator[Scenario]:
    async with contextlib.AsyncExitStack() as stack:
        scenario = Scenario(anvil, deployment)
        people = (OWNER, ORCHESTRATOR, TRAINER, CHALLENGER, *VALIDATORS, HONEST, CHEATER, *JURORS)
        for person in people:
            chain = await Chain.connect(anvil.rpc_url, deployment, key=person.key)
            scenario.chains[person.address] = await stack.enter_async_context(chain)
        yield scenario


async def play(scenario: Scenario) -> None:
    """One judged batch: two accepted and paid, one fraud slashed and final."""
    submissions = [
        scenario.submission(HONEST, 0, units=1000),
        scenario.submission(CHEATER, 0, units=500),
        scenario.submission(HONEST, 1, units=300),
    ]
    records = [accepted(1, submissions[0]), fraud(2, submissions[1]), accepted(1, submissions[2])]
    batch_id = await scenario.commit(submissions)
    await scenario.post(batch_id, submissions, records)
    ledger = scenario.of(ORCHESTRATOR).ledger
    verdict = await scenario.proof(batch_id, 1)
    await ledger.execute_fraud(verdict, scenario.held(verdict, submissions[1], CHEATER))
    await scenario.pass_time(WINDOW_S)
    await ledger.finalise_fraud(verdict)
    batch = (await scenario.view()).batches[batch_id]
    await scenario.of(HONEST).escrow.claim([batch.claim([0, 2])])
    await play_direct(scenario)


async def play_direct(scenario: Scenario) -> None:
    """One submission committed by its worker itself, accepted, not paid yet."""
    submission = scenario.submission(HONEST, 2)
    batch_id = await scenario.submit_direct(submission, HONEST)
    await scenario.post(batch_id, [submission], [accepted(1, submission)], VALIDATORS)
