"""Takes every call to the contracts and to their model, and compares the two after each.

They must agree on whether it succeeds, on the exact error otherwise, on all events, and on
everything that can be observed afterwards.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from contracts_stage import ZERO, Stage, Words

from muster.chain.rpc import Rpc
from muster.chain.structs import PauseCause
from muster.devnet.simulator.model.network import Network
from muster.devnet.simulator.model.words import NOBODY, Name, Refused, Run, Terms
from muster.devnet.simulator.model.work import (
    REVEALED,
    Batch,
    Case,
    Claim,
    Header,
    Proof,
    Record,
    Statement,
    Submission,
    Work,
)
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ContractRevert
from muster.protocol.messages import Verdict

WALLET = 10**6
WORKERS = ("alice", "bob", "carol")
NODES = ("node a", "node b", "node c", "node d", "node e")
VALIDATORS = ("v0", "v1", "v2", "v3", "v4", "v5")
CROWD = ("owner", "orchestrator", "trainer", "challenger", "stranger", *WORKERS, *VALIDATORS)
NAMES = (*CROWD, "insurance", *NODES)
HOLDERS = (*NAMES, "StakeVault", "DisputeCourt", "RewardEscrow")
Send = Callable[[], Awaitable[Any]]


class Duel:
    """The chain and the model, side by side."""

    def __init__(self, runner: asyncio.Runner, stage: Stage, model: Network) -> None:
        self.runner, self.stage, self.model = runner, stage, model
        self.next_time = 0
        self.happened: Counter[str] = Counter()

    @property
    def words(self) -> Words:
        return self.stage.words

    def act(self, caller: str, does: Callable[[], None], sends: Send) -> bool:
        """Do one thing to both; return whether it succeeded. Raises AssertionError at odds."""
        model, stage = self.model, self.stage
        now = max(self.next_time, model.now + 1)
        stage.acting, stage.now, self.next_time = caller, now, 0
        expected = self._foretell(does, now)
        actual = self._happen(sends)
        assert actual == expected, f"chain {actual}\nmodel {expected}"
        self.compare()
        names = [expected[0]] if isinstance(expected, tuple) else [e[0] for e in expected]
        self.happened.update(names)
        return not isinstance(expected, tuple)

    def _foretell(self, does: Callable[[], None], now: int) -> Any:
        said = self.words.said
        try:
            with self.model.transaction(now, self.model.block + 1) as events:
                does()
        except Refused as refused:
            values = tuple(said(value) for value in refused.values)
            return refused.name, tuple(hex0x(v) if isinstance(v, bytes) else v for v in values)
        return _ordered(
            (name, {key.rstrip("_"): said(value) for key, value in args.items()})
            for name, args in events
        )

    def _happen(self, sends: Send) -> Any:
        try:
            result = self.runner.run(_awaited(sends()))
        except ContractRevert as revert:
            return revert.name, revert.args_
        receipt = result[1] if isinstance(result, tuple) else result
        events = [event for event in receipt.events if event.contract != "MusterToken"]
        return _ordered(self.stage.plain(event) for event in events)

    def compare(self) -> None:
        """Assert that everything observable is as the model says."""
        head = self.runner.run(_head(self.stage.rpc))
        assert head == (self.model.block, self.model.now), "the clocks differ"
        asked = list(observations(self.model, self.words))
        answers = self.runner.run(self.stage.read_all([call for call, _ in asked]))
        wrong = [
            f"{contract}.{function}{tuple(args)}: chain {answer}, model {expected}"
            for ((contract, function, args), expected), answer in zip(asked, answers, strict=True)
            if answer != expected
        ]
        assert not wrong, "\n".join(wrong)

    def mine(self, blocks: int) -> None:
        """Mine empty blocks."""
        head = self.runner.run(_mine(self.stage.rpc, blocks))
        self.model.block, self.model.now = head

    def draw(self, weights: Sequence[int], size: int, leaf: Name, draw_block: int) -> list[int]:
        self.words.blocks[draw_block] = self.runner.run(_block_hash(self.stage.rpc, draw_block))
        return self.words.draw(weights, size, leaf, draw_block)


def _ordered(events: Iterator[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(events, key=repr)


async def _awaited(coroutine: Awaitable[Any]) -> Any:
    return await coroutine


async def _mine(rpc: Rpc, blocks: int) -> tuple[int, int]:
    await rpc.call("anvil_mine", hex(blocks), hex(0))
    return await _head(rpc)


async def _head(rpc: Rpc) -> tuple[int, int]:
    head = await rpc.call("eth_getBlockByNumber", "latest", False)
    return int(head["number"], 16), int(head["timestamp"], 16)


async def _block_hash(rpc: Rpc, number: int) -> Any:
    head = await rpc.call("eth_getBlockByNumber", hex(number), False)
    return bytes.fromhex(head["hash"][2:])


# ------------------------------------------------------------------ what can be seen

Observation = tuple[tuple[str, str, Sequence[Any]], tuple[Any, ...]]
"""A view and what it must return."""


def observations(model: Network, words: Words) -> Iterator[Observation]:
    yield from _stakes(model, words)
    yield from _people(model, words)
    for number, run in model.runs.items():
        yield from _run(model, words, number, run)
    yield from _batches(model, words)
    for leaf, case in model.cases.items():
        yield from _case(model, words, leaf, case)
    for batch in list(model.batches.values())[-2:]:
        yield from _standings(model, words, batch)


def _stakes(model: Network, words: Words) -> Iterator[Observation]:
    supply = WALLET * len(CROWD) - model.burned
    yield ("MusterToken", "totalSupply", ()), (supply,)
    for name in HOLDERS:
        held = model.balances[name]
        yield ("MusterToken", "balanceOf", (words.address[name],)), (held,)
    for name in CROWD:
        a = model.stakes[name]
        fields = (a.active, a.unbonding, a.withdrawable_at, a.held_until, a.open_cases)
        yield ("StakeVault", "accountOf", (words.address[name],)), (fields,)
    for offence, escrow in model.escrows.items():
        owner, reporter = words.address[escrow.owner], words.address[escrow.reporter]
        fields = (owner, reporter, escrow.amount, escrow.status)
        yield ("StakeVault", "escrowOf", (words.word(offence),)), (fields,)


def _people(model: Network, words: Words) -> Iterator[Observation]:
    for name in (*WORKERS, "stranger"):
        address = words.address[name]
        yield ("WorkerRegistry", "workerOf", (address,)), (_worker(model, words, name),)
        yield ("WorkerRegistry", "isActive", (address,)), (model.is_active(name),)
        yield ("ContributionLedger", "unitCapOf", (address,)), (model.unit_cap(name),)
    for node in NODES:
        serves = words.address[model.serves(node)]
        yield ("WorkerRegistry", "workerOfNode", (words.address[node],)), (serves,)


def _worker(model: Network, words: Words, name: str) -> tuple[Any, ...]:
    worker = model.workers.get(name)
    if worker is None:
        return (words.address[NOBODY], 0, 0, 0, 0, 0)
    times = (worker.active_from, worker.jailed_until, len(worker.convictions))
    return (words.address[worker.node], worker.number, worker.status, *times)


def _run(model: Network, words: Words, number: int, run: Run) -> Iterator[Observation]:
    config = words.said(run)
    yield ("RunRegistry", "configOf", (number,)), (config,)
    yield ("RunRegistry", "ownerOf", (number,)), (words.address[run.owner],)
    yield ("RunRegistry", "admissionOf", (number,)), (config[1], run.terms.price, run.is_open)
    proposed = (tuple(run.proposed), run.effective_at)
    yield ("RunRegistry", "proposedChange", (number,)), proposed
    yield ("RunRegistry", "closedAt", (number,)), (run.closed_at,)
    yield ("RunRegistry", "isPaused", (number,)), (run.paused,)
    slashes = (run.terms.fraud_ppm, run.terms.exact_ppm, run.slash_paused_until)
    yield ("RunRegistry", "slashesOf", (number,)), slashes
    latest = (max(run.versions, default=0), bool(run.versions))
    yield ("RunRegistry", "latestVersion", (number,)), latest
    bits = tuple(run.seats[validator].bit for validator in run.validators)
    yield ("RunRegistry", "validatorsOf", (number,)), (config[-1], bits)
    funds = model.funds.get(number)
    money = (funds.available, funds.reserved) if funds else (0, 0)
    yield ("RewardEscrow", "fundsOf", (number,)), (money,)


def _batches(model: Network, words: Words) -> Iterator[Observation]:
    yield ("ContributionLedger", "batchCount", ()), (len(model.batches),)
    for number, batch in model.batches.items():
        stored = words.header(batch.header).commitment()
        if batch.disputed:
            stored = type(stored)(stored[:-1] + bytes([stored[-1] | 1]))
        yield ("ContributionLedger", "commitmentOf", (number,)), (stored,)
    for slot in {(work.run, *work[1:4]) for b in model.batches.values() for work in b.submissions}:
        run, worker, step, index = slot
        paid = (run, words.address[worker], step, index)
        yield ("RewardEscrow", "isPaid", paid), (slot in model.paid,)


def _standings(model: Network, words: Words, batch: Batch) -> Iterator[Observation]:
    for place, record in enumerate(batch.records or map(model.as_claimed, batch.submissions)):
        proof = Proof(batch.header, place, record, place, True)
        try:
            standing = model.standing(proof)
        except Refused:
            return  # pending
        fields = (
            words.said_record(record),
            *(words.word(standing.leaf), words.word(standing.offence)),
            *standing[3:],
        )
        view = ("ContributionLedger", "standingOf", (words.proof(proof),))
        yield view, (fields,)


def _case(model: Network, words: Words, leaf: Name, case: Case) -> Iterator[Observation]:
    seats = model.runs[case.run].seats
    fields = (
        *(words.address[case.challenger], case.batch, case.recorded, case.claimed, case.run),
        *(case.status, case.opened_at, case.draw_block, sum(seats[j].bit for j in case.jury)),
        *(case.committed, case.overturn, case.uphold),
    )
    yield ("DisputeCourt", "caseOf", (words.word(leaf),)), (fields,)
    for juror in VALIDATORS:
        vote = case.commitments.get(juror)
        stored = ZERO if vote is None else words.word(("number", 1) if vote == REVEALED else vote)
        arguments = (words.word(leaf), words.address[juror])
        yield ("DisputeCourt", "commitmentOf", arguments), (stored,)


# -------------------------------------------------------------------------- the calls


class Calls(Duel):
    """Every call there is, as one that both sides take."""

    # What the lambdas below read is bound when they are made; each runs before `act` returns.

    def deposit(self, caller: str, owner: str, amount: int) -> bool:
        to = self.words.address[owner]
        return self.act(
            caller,
            lambda: self.model.deposit(caller, owner, amount),
            lambda: self.stage.vault.deposit(to, amount),
        )

    def deposit_with_permit(self, caller: str, amount: int, signed: bool) -> bool:
        permit = self._permit(caller, amount, signed)
        return self.act(
            caller,
            lambda: self.model.deposit_with_permit(caller, amount, signed=signed),
            lambda: self.stage.vault.deposit_with_permit(amount, 2**64, *permit),
        )

    def _permit(self, owner: str, wei: int, valid: bool) -> tuple[Any, ...]:
        token, address = self.stage.token, self.words.address[owner]
        nonce = self.runner.run(token.nonces(address)) + (not valid)
        separator = self.runner.run(token.domain_separator())
        return self.words.permit(owner, wei, nonce, separator)

    def register(
        self, caller: str, stake: int, node: str, deadline: int, consents: bool, permit: bool
    ) -> bool:
        signature = self._consent(caller, node, deadline, consents)
        terms = (stake, self.words.address[node], deadline, signature)
        workers = self.stage.workers
        signed = self._permit(caller, stake, valid=True) if permit else ()
        return self.act(
            caller,
            lambda: self.model.register(
                caller, stake, node, deadline, consents=consents, permit=permit
            ),
            lambda: (
                workers.register_with_permit(*terms, 2**64, *signed)
                if permit
                else self.stage.write("WorkerRegistry", "register", terms)
            ),
        )

    def _consent(self, worker: str, node: str, deadline: int, consents: bool) -> bytes:
        if not consents:
            return b"no"
        nonce = self.model.workers[worker].nonce if worker in self.model.workers else 0
        return self.words.consent(worker, node, nonce, deadline)

    def rotate_node(self, caller: str, node: str, deadline: int, consents: bool) -> bool:
        signature = self._consent(caller, node, deadline, consents)
        address = self.words.address[node]
        return self.act(
            caller,
            lambda: self.model.rotate_node(caller, node, deadline, consents=consents),
            lambda: self.stage.workers.rotate_node(address, deadline, signature),
        )

    def create_run(self, caller: str, run: Run) -> bool:
        config = self.words.config(run)
        return self.act(
            caller,
            lambda: self.model.create_run(caller, run),
            lambda: self.stage.runs.create_run(config),
        )

    def rotate_key(self, caller: str, run: int, role: str, old: str, new: str) -> bool:
        rotate = "rotateTrainer" if role == "trainer" else "rotateOrchestrator"
        keys = self.words.address[old], self.words.address[new]
        return self.act(
            caller,
            lambda: self.model.rotate_key(caller, run, role, old, new),
            lambda: self.stage.write("RunRegistry", rotate, (run, *keys)),
        )

    def propose(self, caller: str, run: int, terms: Terms) -> bool:
        return self.act(
            caller,
            lambda: self.model.propose_change(caller, run, terms),
            lambda: self.stage.write("RunRegistry", "proposeChange", (run, terms)),
        )

    def publish(self, caller: str, run: int, version: int, manifest: str) -> bool:
        root = self.words.word(("manifest", manifest))
        return self.act(
            caller,
            lambda: self.model.publish_checkpoint(caller, run, version, manifest),
            lambda: self.stage.runs.publish_checkpoint(run, version, root),  # type: ignore[arg-type]
        )

    def pause_slashing(self, caller: str, run: int, cause: int, reason: int, why: str) -> bool:
        evidence = self.words.word(("manifest", why)) if why else ZERO
        return self.act(
            caller,
            lambda: self.model.pause_slashing(caller, run, cause, reason, why),
            lambda: self.stage.runs.pause_slashing(
                run,  # type: ignore[arg-type]
                PauseCause.of(cause),
                reason,
                evidence,
            ),
        )

    def fund(self, caller: str, run: int, amount: int) -> bool:
        return self.act(
            caller,
            lambda: self.model.fund(caller, run, amount),
            lambda: self.stage.escrow.fund(run, amount),  # type: ignore[arg-type]
        )

    def commit(self, caller: str, run: int, works: tuple[Submission, ...], units: int) -> bool:
        root = self.words.word(("submissions", works))
        return self.act(
            caller,
            lambda: self.model.commit(caller, run, works, units),
            lambda: self.stage.ledger.commit_batch(run, root, len(works), units),  # type: ignore[arg-type]
        )

    def submit_direct(self, caller: str, work: Submission, signer: str) -> bool:
        words = self.words.submission(work), self.words.signed(work, signer)
        return self.act(
            caller,
            lambda: self.model.submit_direct(caller, work, signer),
            lambda: self.stage.write("ContributionLedger", "submitDirect", words),
        )

    def post(self, header: Header, records: tuple[Record, ...], signers: Sequence[str]) -> bool:
        stated = Statement(header.batch, header.root, records)
        signatures = b"".join(self.words.stated(stated, signer) for signer in signers)
        joined = self.words.joined(records)
        return self.act(
            "stranger",
            lambda: self.model.post(header, records, signers),
            lambda: self.stage.ledger.post_outcomes(self.words.header(header), joined, signatures),
        )

    def execute_fraud(self, proof: Proof, work: Submission, signer: str) -> bool:
        signature = self.words.signed(work, signer)
        return self.act(
            "stranger",
            lambda: self.model.execute_fraud(proof, work, signer),
            lambda: self.stage.ledger.execute_fraud(
                self.words.proof(proof), self.words.submission(work), signature
            ),
        )

    def finalise_fraud(self, proof: Proof) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.finalise_fraud(proof),
            lambda: self.stage.ledger.finalise_fraud(self.words.proof(proof)),
        )

    def challenge(self, caller: str, proof: Proof, claimed: int) -> bool:
        return self.act(
            caller,
            lambda: self.model.challenge(caller, proof, claimed),
            lambda: self.stage.court.challenge(self.words.proof(proof), _verdict(claimed)),
        )

    def draw_jury(self, proof: Proof) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.draw_jury(proof, self.draw),
            lambda: self.stage.court.draw_jury(self.words.proof(proof)),
        )

    def commit_vote(self, caller: str, leaf: Name, vote: Name) -> bool:
        words = self.words.word(leaf), self.words.word(vote)
        return self.act(
            caller,
            lambda: self.model.commit_vote(caller, leaf, vote),
            lambda: self.stage.court.commit_vote(*words),
        )

    def reveal_vote(self, caller: str, leaf: Name, vote: Name) -> bool:
        overturn, result, salt = vote[3:]
        return self.act(
            caller,
            lambda: self.model.reveal_vote(caller, leaf, vote),
            lambda: self.stage.court.reveal_vote(
                self.words.word(leaf),
                bool(overturn),
                self.words.word(("result", result)),
                self.words.word(("number", salt)),
            ),
        )

    def close_case(self, proof: Proof) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.close_case(proof),
            lambda: self.stage.court.close(self.words.proof(proof)),
        )

    def claim(self, claims: Sequence[Claim]) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.claim(claims),
            lambda: self.stage.escrow.claim([self.words.claim(claim) for claim in claims]),
        )

    def recover(self, claims: Sequence[Claim]) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.recover(claims),
            lambda: self.stage.write(
                "RewardEscrow", "recover", ([self.words.claim(claim) for claim in claims],)
            ),
        )

    def slash_signer(self, proof: Proof, validator: str) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.slash_signer(proof, validator),
            lambda: self.stage.faults.slash_signer(
                self.words.proof(proof), self.words.address[validator]
            ),
        )

    def slash_absent_juror(self, caller: str, leaf: Name, juror: str) -> bool:
        words = self.words.word(leaf), self.words.address[juror]
        return self.act(
            caller,
            lambda: self.model.slash_absent_juror(caller, leaf, juror),
            lambda: self.stage.faults.slash_absent_juror(*words),
        )

    def slash_overdue(self, caller: str, header: Header, validator: str) -> bool:
        words = self.words.header(header), self.words.address[validator]
        return self.act(
            caller,
            lambda: self.model.slash_overdue(caller, header, validator),
            lambda: self.stage.faults.slash_overdue(*words),
        )

    def prove_double_outcome(
        self, caller: str, header: Header, signed: Sequence[tuple[Statement, str]]
    ) -> bool:
        pairs = ((self.words.statement(s), self.words.stated(s, by)) for s, by in signed)
        words = self.words.header(header), *itertools.chain.from_iterable(pairs)
        return self.act(
            caller,
            lambda: self.model.prove_double_outcome(caller, header, signed),
            lambda: self.stage.write("FaultCourt", "proveDoubleOutcome", words),
        )

    def prove_double_submission(
        self, caller: str, signed: Sequence[tuple[Submission, str]]
    ) -> bool:
        pairs = ((self.words.submission(s), self.words.signed(s, by)) for s, by in signed)
        words = tuple(itertools.chain.from_iterable(pairs))
        return self.act(
            caller,
            lambda: self.model.prove_double_submission(caller, signed),
            lambda: self.stage.write("FaultCourt", "proveDoubleSubmission", words),
        )

    def prove_overcommit(self, works: Sequence[Work]) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.prove_overcommit(works),
            lambda: self.stage.write(
                "FaultCourt", "proveOvercommit", ([self.words.work(w) for w in works],)
            ),
        )

    def hold_stake(self, work: Work) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.hold_stake(work),
            lambda: self.stage.write("FaultCourt", "holdStake", (self.words.work(work),)),
        )

    def simple(self, caller: str, name: str, *args: Any) -> bool:
        """A call whose arguments are numbers and names, see SIMPLE."""
        contract, function, named = SIMPLE[name]
        told = [self.words.address[arg] if isinstance(arg, str) else arg for arg in args]
        does = getattr(self.model, name)
        return self.act(
            caller,
            (lambda: does(caller, *args)) if named else (lambda: does(*args)),
            lambda: self.stage.write(contract, function, told),
        )


SIMPLE = {
    "request_unbond": ("StakeVault", "requestUnbond", True),
    "withdraw": ("StakeVault", "withdraw", True),
    "exit": ("WorkerRegistry", "exit", True),
    "unjail": ("WorkerRegistry", "unjail", True),
    "rejoin": ("WorkerRegistry", "rejoin", True),
    "jail_for_low_stake": ("WorkerRegistry", "jailForLowStake", False),
    "seat_validator": ("RunRegistry", "seatValidator", True),
    "rotate_validator": ("RunRegistry", "rotateValidator", True),
    "unseat_validator": ("RunRegistry", "unseatValidator", False),
    "cancel_change": ("RunRegistry", "cancelChange", True),
    "apply_change": ("RunRegistry", "applyChange", False),
    "record_beacon": ("RunRegistry", "recordBeacon", False),
    "pause": ("RunRegistry", "setSubmissionsPaused", True),
    "close_run": ("RunRegistry", "closeRun", True),
    "reclaim": ("RewardEscrow", "reclaim", False),
}
"""By the model's name: contract, its function, and whether the model asks who calls."""


def _verdict(number: int) -> Any:
    return Verdict(number) if 1 <= number <= 4 else number
