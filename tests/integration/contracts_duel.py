"""Takes every call to the contracts and to their model, and compares the two after each.

They must agree on whether it succeeds, on the exact error otherwise, on all events, and on
everything that can be observed afterwards.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from contracts_stage import SOURCES, ZERO, Stage, Words

from muster.chain.rpc import Rpc
from muster.chain.structs import NodeConsent, PauseCause, Permit
from muster.lab.simulator.model.network import Network
from muster.lab.simulator.model.words import BENCH, HELD, NOBODY, Member, Name, Refused, Run, Terms
from muster.lab.simulator.model.work import (
    Batch,
    Case,
    Claim,
    Header,
    Leased,
    Proof,
    Record,
    Statement,
    Submission,
)
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ContractRevert

WALLET = 10**6
WORKERS = ("alice", "bob", "carol")
NODES = ("node a", "node b", "node c", "node d", "node e")
VALIDATORS = ("v0", "v1", "v2", "v3", "v4", "v5")
JURORS = ("j0", "j1", "j2", "j3")
CROWD = (
    "owner",
    "orchestrator",
    "trainer",
    "challenger",
    "stranger",
    *WORKERS,
    *VALIDATORS,
    *JURORS,
)
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

    def draw_of(self, *args: Any) -> list[str]:
        """The draw of the protocol, with the hash of the block that decides it."""
        draw_block = args[2]
        self.words.blocks[draw_block] = self.runner.run(_block_hash(self.stage.rpc, draw_block))
        return self.words.draw(*args)


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


# ------------------------------------------------------------------ observable state

Observation = tuple[tuple[str, str, Sequence[Any]], tuple[Any, ...]]
"""A view and its expected result."""


def observations(model: Network, words: Words) -> Iterator[Observation]:
    yield from _stakes(model, words)
    yield from _people(model, words)
    for number, run in model.runs.items():
        yield from _run(model, words, number, run)
    yield from _bench(model, words)
    yield from _batches(model, words)
    for name, case in model.cases.items():
        yield from _case(model, words, name, case)
    for batch in list(model.batches.values())[-2:]:
        yield from _standings(model, words, batch)


def _stakes(model: Network, words: Words) -> Iterator[Observation]:
    supply = WALLET * len(CROWD) - model.burned
    yield ("MusterToken", "totalSupply", ()), (supply,)
    for name in HOLDERS:
        held = model.balances[name]
        yield ("MusterToken", "balanceOf", (words.address[name],)), (held,)
    for run in (BENCH, *model.runs):
        for name in CROWD:
            a = model.stakes[run, name]
            held = sum(model.escrows[taken].status == HELD for taken in a.escrows)
            fields = (a.active, a.unbonding, a.withdrawable_at, held)
            yield ("StakeVault", "accountOf", (run, words.address[name])), (fields,)
    for escrow_name, escrow in model.escrows.items():
        taken = (escrow.amount, escrow.ppm, escrow.batch, escrow.position, escrow.status)
        yield ("StakeVault", "escrowOf", (words.word(escrow_name),)), (taken,)


def _people(model: Network, words: Words) -> Iterator[Observation]:
    for name in (*WORKERS, "stranger"):
        address, worker = words.address[name], model.workers.get(name)
        known = (
            (worker.number, words.address[worker.node]) if worker else (0, words.address[NOBODY])
        )
        yield ("WorkerRegistry", "workerOf", (address,)), known
        for run in model.runs:
            fields = _member(model.members[run, name])
            yield ("WorkerRegistry", "memberOf", (run, address)), (fields,)
            yield ("WorkerRegistry", "isActive", (run, address)), (model.is_active(run, name),)
            cap = model.unit_cap(run, name)
            yield ("ContributionLedger", "unitCapOf", (run, address)), (cap,)
    for node in NODES:
        serves = words.address[model.serves(node)]
        yield ("WorkerRegistry", "workerOfNode", (words.address[node],)), (serves,)


def _member(m: Member) -> tuple[Any, ...]:
    return (m.status, m.active_from, m.jailed_until, m.left_at, m.convictions, m.exact, m.before)


def _run(model: Network, words: Words, number: int, run: Run) -> Iterator[Observation]:
    present = replace(run, terms=run.all_terms[-1])
    config = words.said(present)
    yield ("RunRegistry", "configOf", (number,)), (config,)
    yield ("RunRegistry", "ownerOf", (number,)), (words.address[run.owner],)
    count, price = len(run.all_terms), present.terms.price
    yield ("RunRegistry", "admissionOf", (number,)), (config[1], run.is_open, count, price)
    proposed = (tuple(run.proposed), run.effective_at)
    yield ("RunRegistry", "proposedChange", (number,)), proposed
    for place, terms in enumerate(run.all_terms):
        yield ("RunRegistry", "termsAt", (number, place + 1)), (tuple(terms),)
    yield ("RunRegistry", "closedAt", (number,)), (run.closed_at,)
    yield ("RunRegistry", "isPaused", (number,)), (run.paused,)
    yield ("RunRegistry", "slashPausedUntil", (number,)), (run.slash_paused_until,)
    latest = (max(run.versions, default=0), bool(run.versions))
    yield ("RunRegistry", "latestVersion", (number,)), latest
    bits = tuple(run.seats[validator].bit for validator in run.validators)
    yield ("RunRegistry", "validatorsOf", (number,)), (config[-1], bits)
    ever = tuple(words.address[v] for v, s in run.seats.items() if s.since <= model.now)
    yield ("RunRegistry", "everSeated", (number, model.now)), (ever,)
    for validator in VALIDATORS:
        invited = validator in run.invited
        yield ("RunRegistry", "isInvited", (number, words.address[validator])), (invited,)
    funds = model.funds.get(number)
    money = (funds.available, funds.reserved) if funds else (0, 0)
    yield ("RewardEscrow", "fundsOf", (number,)), (money,)


def _bench(model: Network, words: Words) -> Iterator[Observation]:
    yield ("JuryPool", "placeCount", ()), (len(model.bench),)
    for number, place in enumerate(model.bench):
        fields = (words.address[place.juror], place.joined_at, place.left_at)
        yield ("JuryPool", "placeAt", (number,)), (fields,)
    for juror in (*JURORS, "stranger"):
        may = model.may_be_drawn(juror, model.now)
        yield ("JuryPool", "mayBeDrawn", (words.address[juror], model.now)), (may,)


def _batches(model: Network, words: Words) -> Iterator[Observation]:
    yield ("ContributionLedger", "batchCount", ()), (len(model.batches),)
    for number, batch in model.batches.items():
        stored = ZERO if batch.is_void else words.header(batch.header).commitment()
        if batch.disputed:
            stored = type(stored)(stored[:-1] + bytes([stored[-1] | 1]))
        yield ("ContributionLedger", "commitmentOf", (number,)), (stored,)
        payer = words.address[model.bonds.get(number, NOBODY)]
        yield ("DisputeCourt", "bondOf", (number,)), (payer,)
    for slot in {(work.run, *work[1:4]) for b in model.batches.values() for work in b.submissions}:
        run, worker, step, index = slot
        paid = (run, words.address[worker], step, index)
        yield ("RewardEscrow", "isPaid", paid), (slot in model.paid,)


def _standings(model: Network, words: Words, batch: Batch) -> Iterator[Observation]:
    for place, record in enumerate(batch.records):
        proof = Proof(batch.header, place, record, place, True)
        standing = model.standing(proof)
        fields = (words.said_record(record), words.word(standing.leaf), *standing[2:])
        view = ("ContributionLedger", "standingOf", (words.proof(proof),))
        yield view, (fields,)


def _case(model: Network, words: Words, name: Name, case: Case) -> Iterator[Observation]:
    ruling, votes, tied = case.leading()
    fields = (
        *(case.status, case.recorded, ruling, votes, tied),
        *(len(case.jury), len(case.commitments), len(case.revealed)),
        *(case.opened_at, case.number, case.run, case.draw_block),
        *(words.address[case.worker], case.tag, case.places),
        *(words.address[case.reporter], case.fee, case.is_proven),
    )
    yield ("DisputeCourt", "caseOf", (words.word(name),)), (fields,)
    claims = tuple((words.address[m.claimant], m.ruling, m.announced_in) for m in case.claims)
    yield ("DisputeCourt", "claimsOf", (words.word(name),)), (claims,)
    for juror in (*JURORS, "stranger"):
        stored = _vote(case, words, juror)
        yield ("DisputeCourt", "voteOf", (words.word(name), words.address[juror])), (stored,)


def _vote(case: Case, words: Words, juror: str) -> Any:
    if juror in case.paid:
        return words.word(("number", 3))
    if juror in case.revealed:
        return words.word(("number", case.revealed[juror] << 8 | 2))
    if juror in case.commitments:
        return words.word(case.commitments[juror])
    return words.word(("number", int(juror in case.jury)))


# -------------------------------------------------------------------------- the calls


class Calls(Duel):
    """Every call of the contracts, in a form that both sides take."""

    # The lambdas below bind their values when they are made; each runs before `act` returns.

    def deposit(self, caller: str, run: int, owner: str, amount: int) -> bool:
        to = self.words.address[owner]
        return self.act(
            caller,
            lambda: self.model.deposit(caller, run, owner, amount),
            lambda: self.stage.vault.deposit(run, to, amount),  # type: ignore[arg-type]
        )

    def join(
        self,
        caller: str,
        run: int,
        terms: int,
        stake: int,
        node: str,
        deadline: int,
        *,
        consents: bool,
        permit: bool,
    ) -> bool:
        consent = self._consent(caller, node, deadline, consents)
        signed = self._permit(caller, stake) if permit else Permit()
        return self.act(
            caller,
            lambda: self.model.join(
                caller, run, terms, stake, node, deadline, consents=consents, permit=permit
            ),
            lambda: self.stage.workers.join(run, terms, stake, consent, signed),  # type: ignore[arg-type]
        )

    def _permit(self, owner: str, wei: int) -> Permit:
        token, address = self.stage.token, self.words.address[owner]
        nonce = self.runner.run(token.nonces(address))
        (separator,) = self.runner.run(self.stage.read("MusterToken", "DOMAIN_SEPARATOR", []))
        return Permit(2**64, *self.words.permit(owner, wei, nonce, separator))

    def _consent(self, worker: str, node: str, deadline: int, consents: bool) -> NodeConsent:
        signature = b"no"
        if consents and node != NOBODY:
            nonce = self.model.workers[worker].nonce if worker in self.model.workers else 0
            signature = self.words.consent(worker, node, nonce, deadline)
        return NodeConsent(self.words.address[node], deadline, signature)

    def rotate_node(self, caller: str, node: str, deadline: int, consents: bool) -> bool:
        consent = self._consent(caller, node, deadline, consents)
        return self.act(
            caller,
            lambda: self.model.rotate_node(caller, node, deadline, consents=consents),
            lambda: self.stage.workers.rotate_node(consent),
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

    def submit_direct(self, caller: str, work: Leased) -> bool:
        leased = self.words.leased(work)
        return self.act(
            caller,
            lambda: self.model.submit_direct(caller, work),
            lambda: self.stage.ledger.submit_direct(leased, SOURCES),
        )

    def split_off(
        self, caller: str, header: Header, work: Leased, position: int, intact: bool
    ) -> bool:
        siblings = self.words.siblings(header.root, position, intact)
        leased = self.words.leased(work)
        return self.act(
            caller,
            lambda: self.model.split_off(caller, header, work, position, intact),
            lambda: self.stage.ledger.split_off(
                self.words.header(header), leased, position, siblings, SOURCES
            ),
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

    def execute_fraud(self, proof: Proof, work: Submission, signer: str, held: bool = True) -> bool:
        shown = self.words.held(proof, work, signer, held)
        return self.act(
            "stranger",
            lambda: self.model.execute_fraud(proof, work, signer, held),
            lambda: self.stage.ledger.execute_fraud(self.words.proof(proof), shown),
        )

    def finalise_fraud(self, proof: Proof) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.finalise_fraud(proof),
            lambda: self.stage.ledger.finalise_fraud(self.words.proof(proof)),
        )

    def show(
        self, header: Header, stated: Statement, signer: str, records: tuple[Record, ...]
    ) -> bool:
        signature = self.words.stated(stated, signer)
        hashed, shown = self.words.word(("recordshash", stated.records)), self.words.joined(records)
        return self.act(
            "stranger",
            lambda: self.model.show(header, stated, signer, records),
            lambda: self.stage.ledger.show_outcomes(
                self.words.header(header), hashed, shown, signature
            ),
        )

    def void(self, header: Header) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.void(header),
            lambda: self.stage.ledger.void_batch(self.words.header(header)),
        )

    def announce(self, caller: str, announcement: Name) -> bool:
        return self.act(
            caller,
            lambda: self.model.announce(caller, announcement),
            lambda: self.stage.court.announce(self.words.word(announcement)),
        )

    def claim_ruling(
        self,
        caller: str,
        proof: Proof,
        work: Submission,
        signer: str,
        ruling: int,
        salt: int,
        held: bool = True,
    ) -> bool:
        shown = self.words.held(proof, work, signer, held)
        return self.act(
            caller,
            lambda: self.model.claim_ruling(caller, proof, work, signer, ruling, salt, held),
            lambda: self.stage.court.claim(
                self.words.proof(proof), shown, ruling, self.words.word(("number", salt)), SOURCES
            ),
        )

    def summon(self, caller: str, header: Header, work: Submission) -> bool:
        return self.act(
            caller,
            lambda: self.model.summon(caller, header, work),
            lambda: self.stage.court.summon(
                self.words.header(header), self.words.submission(work), SOURCES
            ),
        )

    def draw(self, case: Name) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.draw(case, self.draw_of),
            lambda: self.stage.court.draw(self.words.word(case)),
        )

    def commit_vote(self, caller: str, case: Name, vote: Name) -> bool:
        words = self.words.word(case), self.words.word(vote)
        return self.act(
            caller,
            lambda: self.model.commit_vote(caller, case, vote),
            lambda: self.stage.court.commit_vote(*words),
        )

    def reveal_vote(self, caller: str, case: Name, vote: Name) -> bool:
        ruling, result, salt = vote[3:]
        return self.act(
            caller,
            lambda: self.model.reveal_vote(caller, case, vote),
            lambda: self.stage.court.reveal_vote(
                self.words.word(case),
                int(ruling),
                self.words.word(("result", result)),
                self.words.word(("number", salt)),
            ),
        )

    def settle(self, proof: Proof) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.settle(proof),
            lambda: self.stage.court.settle(self.words.proof(proof)),
        )

    def prove(self, proof: Proof, work: Submission, signer: str, held: bool = True) -> bool:
        shown = self.words.held(proof, work, signer, held)
        return self.act(
            "stranger",
            lambda: self.model.prove(proof, work, signer, held),
            lambda: self.stage.court.prove(self.words.proof(proof), shown),
        )

    def settle_summoned(self, header: Header, work: Submission) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.settle_summoned(header, work),
            lambda: self.stage.court.settle_summoned(
                self.words.header(header), self.words.submission(work)
            ),
        )

    def return_bond(self, header: Header) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.return_bond(header),
            lambda: self.stage.court.return_bond(self.words.header(header)),
        )

    def collect_fee(self, case: Name, juror: str) -> bool:
        words = self.words.word(case), self.words.address[juror]
        return self.act(
            "stranger",
            lambda: self.model.collect_fee(case, juror),
            lambda: self.stage.court.collect_fee(*words),
        )

    def fine_absent_juror(self, case: Name, juror: str) -> bool:
        words = self.words.word(case), self.words.address[juror]
        return self.act(
            "stranger",
            lambda: self.model.fine_absent_juror(case, juror),
            lambda: self.stage.court.fine_absent_juror(*words),
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

    def fine_signer(self, proof: Proof, validator: str) -> bool:
        return self.act(
            "stranger",
            lambda: self.model.fine_signer(proof, validator),
            lambda: self.stage.court.fine_signer(
                self.words.proof(proof), self.words.address[validator]
            ),
        )

    def prove_double_outcome(self, header: Header, signed: Sequence[tuple[Statement, str]]) -> bool:
        pairs = ((self.words.statement(s), self.words.stated(s, by)) for s, by in signed)
        words = self.words.header(header), *itertools.chain.from_iterable(pairs)
        return self.act(
            "stranger",
            lambda: self.model.prove_double_outcome(header, signed),
            lambda: self.stage.write("FaultCourt", "proveDoubleOutcome", words),
        )

    def prove_double_submission(
        self, proof: Proof, signed: Sequence[tuple[Submission, str]], held: bool = True
    ) -> bool:
        shown, (second, by) = self.words.held(proof, *signed[0], held), signed[1]
        other = self.words.submission(second), self.words.signed(second, by)
        return self.act(
            "stranger",
            lambda: self.model.prove_double_submission(proof, signed, held),
            lambda: self.stage.faults.prove_double_submission(
                self.words.proof(proof), shown, *other
            ),
        )

    def prove_misrecord(
        self, proof: Proof, work: Submission, signer: str, validator: str, held: bool = True
    ) -> bool:
        shown = self.words.held(proof, work, signer, held)
        return self.act(
            "stranger",
            lambda: self.model.prove_misrecord(proof, work, signer, validator, held),
            lambda: self.stage.faults.prove_misrecord(
                self.words.proof(proof), shown, self.words.address[validator]
            ),
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
    "come_back": ("WorkerRegistry", "comeBack", True),
    "jail_for_low_stake": ("WorkerRegistry", "jailForLowStake", False),
    "invite": ("RunRegistry", "invite", True),
    "dismiss": ("RunRegistry", "dismiss", True),
    "take_seat": ("RunRegistry", "takeSeat", True),
    "leave_seat": ("RunRegistry", "leaveSeat", True),
    "unseat_for_low_stake": ("RunRegistry", "unseatForLowStake", False),
    "cancel_change": ("RunRegistry", "cancelChange", True),
    "apply_change": ("RunRegistry", "applyChange", False),
    "pause": ("RunRegistry", "setSubmissionsPaused", True),
    "close_run": ("RunRegistry", "closeRun", True),
    "join_bench": ("JuryPool", "join", True),
    "leave_bench": ("JuryPool", "leave", True),
    "retire_for_low_stake": ("JuryPool", "retireForLowStake", False),
    "shorten_bench": ("JuryPool", "shorten", False),
    "reclaim": ("RewardEscrow", "reclaim", False),
}
"""By the model's name: contract, function, and whether the model takes the caller."""
