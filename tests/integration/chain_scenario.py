"""A small network on a real Anvil, step by step, for the tests of muster.chain and muster audit."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from muster.chain import (
    Chain,
    ChainView,
    Deployment,
    EventReader,
    OutcomeProof,
    RunConfig,
    RunTerms,
    apply_poll,
)
from muster.chain.rpc import Rpc
from muster.deploy import DeployParameters, deploy_contracts
from muster.devnet.anvil import Anvil
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
PERMIT = "Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"


@dataclass(frozen=True)
class Person:
    key: bytes

    @property
    def address(self) -> Address:
        return address_of(self.key)


OWNER, ORCHESTRATOR, TRAINER, CHALLENGER = (Person(Anvil.key(i)) for i in range(4))
VALIDATORS = tuple(Person(Anvil.key(i)) for i in (4, 5, 6))
HONEST, CHEATER = Person(Anvil.key(7)), Person(Anvil.key(8))


def node_of(worker: Person) -> Person:
    return Person(keccak(b"node of" + worker.key))


@dataclass
class Scenario:
    """A deployed network with everybody's connection."""

    anvil: Anvil
    deployment: Deployment
    chains: dict[Address, Chain] = field(default_factory=dict)
    run_id: RunId = NO_RUN

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

    async def register(self, worker: Person, stake: int = 100 * TOKEN) -> None:
        chain, node = self.of(worker), node_of(worker)
        await chain.token.faucet(worker.address, stake)
        deadline = await chain.now() + 3600
        consent = await self.consent(worker, node, deadline)
        v, r, s = await self.permit(worker, stake, deadline)
        await chain.workers.register_with_permit(
            stake, node.address, deadline, consent, deadline, v, r, s
        )

    async def consent(self, worker: Person, node: Person, deadline: int) -> bytes:
        chain = self.of(worker)
        nonce = await chain.workers.nonces(worker.address)
        message = NodeRegistration(worker.address, node.address, nonce, deadline)
        hashed = digest(chain.domain("WorkerRegistry"), message.struct_hash())
        return sign(hashed, node.key)

    async def permit(self, owner: Person, wei: int, deadline: int) -> tuple[int, Hash32, Hash32]:
        chain = self.of(owner)
        permit = struct_hash(
            PERMIT,
            address_bytes(owner.address),
            address_bytes(self.deployment.contracts["StakeVault"]),
            wei,
            await chain.token.nonces(owner.address),
            deadline,
        )
        separator = await chain.token.domain_separator()
        signature = sign(keccak(b"\x19\x01" + separator + permit), owner.key)
        return signature[64], Hash32(signature[:32]), Hash32(signature[32:64])

    async def bond(self, validator: Person) -> None:
        chain, stake = self.of(validator), PARAMETERS.required_validator_stake
        await chain.token.faucet(validator.address, stake)
        await chain.token.approve(self.deployment.contracts["StakeVault"], stake)
        await chain.vault.deposit(validator.address, stake)

    def config(self) -> RunConfig:
        names = ("model", "tasks", "recipe", "calibration")
        return RunConfig(
            TRAINER.address,
            ORCHESTRATOR.address,
            *(keccak(name.encode()) for name in names),
            terms=RunTerms(PRICE, FRAUD_PPM, EXACT_FRAUD_PPM, 2),
            validators=tuple(v.address for v in VALIDATORS),
        )

    async def create_run(self) -> None:
        chain = self.of(OWNER)
        self.run_id, _ = await chain.runs.create_run(self.config())
        await chain.token.approve(self.deployment.contracts["RewardEscrow"], TOKEN)
        await chain.escrow.fund(self.run_id, TOKEN)
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
        root = merkle_root([s.leaf() for s in submissions])
        units = sum(s.units for s in submissions)
        ledger = self.of(ORCHESTRATOR).ledger
        batch_id, _ = await ledger.commit_batch(self.run_id, root, len(submissions), units)
        return batch_id

    async def post(
        self,
        batch_id: int,
        submissions: Sequence[Submission],
        records: list[OutcomeRecord],
        signers: Sequence[Person] = VALIDATORS[:2],
        sender: Person = ORCHESTRATOR,
    ) -> None:
        root = merkle_root([s.leaf() for s in submissions])
        packed = pack_records(records)
        message = Outcomes(batch_id, root, keccak(packed))
        hashed = digest(self.of(OWNER).domain("ContributionLedger"), message.struct_hash())
        ordered = sorted(signers, key=lambda signer: int(signer.address, 16))
        signatures = [sign(hashed, signer.key) for signer in ordered]
        header = (await self.view()).batches[batch_id].header()
        await self.of(sender).ledger.post_outcomes(header, packed, b"".join(signatures))

    async def proof(self, batch_id: int, position: int) -> OutcomeProof:
        return (await self.view()).batches[batch_id].prove(position)

    async def dispute(self, proof: OutcomeProof, claimed: Verdict) -> None:
        chain, bond = self.of(CHALLENGER), PARAMETERS.challenge_bond
        await chain.token.faucet(CHALLENGER.address, bond)
        await chain.token.approve(self.deployment.contracts["DisputeCourt"], bond)
        opened = await chain.court.challenge(proof, claimed)
        leaf = opened.event("CaseOpened").args["leaf"]
        assert await chain.read("DisputeCourt", "isOpen", [leaf]) == (True,)
        await self.rpc.call("anvil_mine", hex(PARAMETERS.draw_delay_blocks + 1))
        await chain.court.draw_jury(proof)
        # The third validator did not sign: it is the jury.
        juror = self.of(VALIDATORS[2])
        salt, result = keccak(b"salt"), keccak(b"result")
        commitment = vote_commitment(leaf, VALIDATORS[2].address, True, result, salt)
        await juror.court.commit_vote(leaf, commitment)
        await juror.court.reveal_vote(leaf, True, result, salt)
        await chain.court.close(proof)

    def node_signature(self, submission: Submission, worker: Person) -> bytes:
        domain = self.of(OWNER).domain("ContributionLedger")
        return sign(digest(domain, submission.struct_hash()), node_of(worker).key)


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
    return record(worker_id, submission, Verdict.REJECTED, Reason.LATE)


@contextlib.asynccontextmanager
async def network(*, with_run: bool = True, block_time_s: float = 1) -> AsyncIterator[Scenario]:
    """Start a chain with the contracts, bonded validators, two workers and a funded run."""
    async with contextlib.AsyncExitStack() as stack:
        anvil = await stack.enter_async_context(Anvil(block_time_s=block_time_s))
        deployment = await deploy_contracts(anvil.rpc_url, OWNER.key, PARAMETERS)
        scenario = Scenario(anvil, deployment)
        people = (OWNER, ORCHESTRATOR, TRAINER, CHALLENGER, *VALIDATORS, HONEST, CHEATER)
        for person in people:
            chain = await Chain.connect(anvil.rpc_url, deployment, key=person.key)
            scenario.chains[person.address] = await stack.enter_async_context(chain)
        if with_run:
            for validator in VALIDATORS:
                await scenario.bond(validator)
            await scenario.register(HONEST)
            await scenario.register(CHEATER)
            # Policies must be newer than the workers' first active block.
            await scenario.rpc.call("evm_mine")
            await scenario.create_run()
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
    evidence = scenario.node_signature(submissions[1], CHEATER)
    ledger = scenario.of(ORCHESTRATOR).ledger
    verdict = await scenario.proof(batch_id, 1)
    await ledger.execute_fraud(verdict, submissions[1], evidence)
    await scenario.pass_time(WINDOW_S)
    await ledger.finalise_fraud(verdict)
    batch = (await scenario.view()).batches[batch_id]
    await scenario.of(HONEST).escrow.claim([batch.claim([0, 2])])
    await play_direct(scenario)


async def play_direct(scenario: Scenario) -> None:
    """One submission committed by its worker itself, accepted, not paid yet."""
    submission = scenario.submission(HONEST, 2)
    signature = scenario.node_signature(submission, HONEST)
    receipt = await scenario.of(HONEST).write(
        "ContributionLedger", "submitDirect", [submission, signature]
    )
    batch_id = receipt.event("BatchCommitted").args["batch_id"]
    await scenario.post(batch_id, [submission], [accepted(1, submission)], VALIDATORS)
