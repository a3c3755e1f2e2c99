"""Coalitions of owner, orchestrator, validators and capital: the share at which a promise breaks.

Played on the model of the contracts, whose equality to them the differential test checks. In a run
with all its workers, the owner, the orchestrator and a quorum of validators collude. Every honest
party acts as its client does, and capital bought a share of the network's bench. Each play brings
many cases before juries that are drawn as on chain; dishonest jurors vote as the coalition wants.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from random import Random

from muster.lab.simulator.model import words
from muster.lab.simulator.model.network import Network
from muster.lab.simulator.model.words import Fixed, Name, Refused
from muster.lab.simulator.model.work import (
    ACCEPTED,
    FRAUD,
    Header,
    Leased,
    Proof,
    Record,
    Submission,
    Ticket,
)
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address
from muster.protocol.jury import BenchPlace, draw_jury, jury_seed

RUN, OTHER = 1, 2
BENCH = 200
"""Places of the network's bench."""
UNITS = 100
WEALTH = 10**30
"""Tokens of every party: enough for all bonds."""
ACCEPT, CONVICT = ACCEPTED << 8, FRAUD << 8 | 31
SHARES = tuple(n / 20 for n in range(21))
RARELY, MOSTLY = 0.01, 0.5
"""Shares of broken cases above which a promise counts as broken now and then, and mostly."""


def _address(number: int) -> str:
    return str(Address(f"0x{number:040x}"))


@dataclass
class Stage:
    """One network: a run of the coalition's and another one, on the same contracts."""

    fixed: Fixed
    workers: int
    validators: int
    quorum: int
    share: float
    """The coalition's share of the bench."""
    random: Random
    state: Network = field(init=False)
    bought: frozenset[str] = frozenset()
    """Jurors of the coalition."""

    def __post_init__(self) -> None:
        self.people = [_address(1_000_000 + n) for n in range(self.workers)]
        self.seats = [_address(10 + n) for n in range(self.validators)]
        bench = [_address(1000 + n) for n in range(BENCH)]
        self.bought = frozenset(self.random.sample(bench, round(self.share * BENCH)))
        rank = {name: int(name, 16) for name in self.seats}
        self.state = Network(self.fixed, 1000, 1, rank)
        terms = words.Terms(1, 100_000, 500_000, self.quorum)
        for owner in ("owner", "stranger"):
            run = words.Run(owner, "trainer", "orchestrator", terms, list(self.seats))
            self.state.create_run(owner, run)
            self._endow(owner)
            self.state.fund(owner, len(self.state.runs), WEALTH // 2)
        for name in self.seats:
            self._endow(name)
            for number in (RUN, OTHER):
                self.state.take_seat(name, number, 1, self.fixed.required_validator_stake)
        for name in bench:
            self._endow(name)
            self.state.join_bench(name, self.fixed.required_juror_stake)
        for name in self.people:
            self._endow(name)
            for number, node in ((RUN, f"node of {name}"), (OTHER, words.NOBODY)):
                stake = self.fixed.required_stake
                self.state.join(name, number, 1, stake, node, 2**60, consents=True, permit=False)
        self.tick(self.fixed.activation_delay)

    def _endow(self, name: str) -> None:
        self.state.balances[name] = WEALTH
        for holder in ("StakeVault", "DisputeCourt", "RewardEscrow"):
            self.state.allowances[name, holder] = 2**256 - 1

    def tick(self, blocks: int = 1, seconds: int = 1) -> None:
        """Let time pass."""
        self.state.block += blocks
        self.state.now += seconds
        self.state.events = []

    # ---------------------------------------------------------------- steps of a play

    def commit(self, step: int, cases: int) -> list[Submission]:
        """Commit one submission each of `cases` workers; return the submissions."""
        chosen = self.random.sample(self.people, cases)
        works = [Submission(RUN, name, step, 0, 0, name, 8, UNITS) for name in chosen]
        self.state.commit("orchestrator", RUN, tuple(works), UNITS * cases)
        return works

    def newest(self) -> Header:
        """Return the newest batch's header."""
        return self.state.batches[len(self.state.batches)].header

    def post(self, works: Sequence[Submission], ruling: int, signers: int) -> list[Proof]:
        """Record a ruling about all of the newest batch's work, signed by some validators."""
        state, header = self.state, self.newest()
        records = tuple(
            Record(state.number_of(w.worker), *w[2:], verdict=ruling >> 8, reason=ruling & 255)
            for w in works
        )
        state.post(header, records, self.seats[:signers])
        judged = self.newest()
        return [Proof(judged, place, record, place, True) for place, record in enumerate(records)]

    def claim(self, claimants: Sequence[str], proofs: Sequence[Proof], ruling: int) -> list[Name]:
        """Dispute each outcome; return the cases."""
        state = self.state
        names: list[Name] = [state.standing(proof).leaf for proof in proofs]
        for who, name in zip(claimants, names, strict=True):
            state.announce(who, ("announcement", who, name, ruling, 1))
        self.tick()
        batch = state.batches[proofs[0].header.batch]
        for who, proof in zip(claimants, proofs, strict=True):
            work = batch.submissions[proof.position]
            state.claim_ruling(who, proof, work, f"node of {work.worker}", ruling, 1)
        return names

    def vote(self, names: Sequence[Name], truth: int, wanted: int) -> None:
        """Draw every case's jury and let it vote: honest jurors for the truth, the others as the
        coalition wants.
        """
        state = self.state
        self.tick(self.fixed.draw_delay + 1)
        for name in names:
            state.draw(name, self._draw)
        for name in names:
            for juror in state.cases[name].jury:
                ruling = wanted if juror in self.bought else truth
                state.commit_vote(juror, name, ("vote", name, juror, ruling, 0, 0))
            for juror in state.cases[name].jury:
                state.reveal_vote(juror, name, state.cases[name].commitments[juror])

    def _draw(
        self,
        places: Sequence[words.Place],
        name: Name,
        draw_block: int,
        opened_at: int,
        size: int,
        excluded: Collection[str],
    ) -> list[str]:
        bench = [BenchPlace(Address(place.juror), place.joined_at) for place in places]
        beacon = keccak(f"{self.random.getrandbits(64)} {draw_block}".encode())
        seed = jury_seed(beacon, keccak(repr(name).encode()))
        out = {Address(who) for who in excluded if who.startswith("0x")}
        return [
            str(juror)
            for juror in draw_jury(bench, opened_at=opened_at, size=size, seed=seed, excluded=out)
        ]

    def staked(self, run: int, name: str) -> int:
        """Return an account's active stake in a run."""
        return self.state.stakes[run, name].active


Play = Callable[[Stage, int], int]
"""Plays a number of cases on a stage; returns in how many the promise broke."""


def framed(stage: Stage, cases: int) -> int:
    """A quorum calls honest work fraud and has it slashed at once; each worker disputes it."""
    works = stage.commit(1, cases)
    proofs = stage.post(works, CONVICT, stage.quorum)
    for proof, work in zip(proofs, works, strict=True):
        stage.state.execute_fraud(proof, work, f"node of {work.worker}")
    names = stage.claim([work.worker for work in works], proofs, ACCEPT)
    stage.vote(names, ACCEPT, CONVICT)
    for proof in proofs:
        stage.state.settle(proof)
    full = stage.fixed.required_stake
    return sum(stage.staked(RUN, work.worker) < full for work in works)


def starved(stage: Stage, cases: int) -> int:
    """Nobody of the run judges; each worker takes its work out and calls judges of the network."""
    state, works = stage.state, stage.commit(2, cases)
    number = stage.newest().batch
    stage.tick(seconds=stage.fixed.outcome_deadline)
    names: list[Name] = []
    for place, work in enumerate(works):
        ticket = Ticket(*work[:5], deadline=state.now)
        leased = Leased(work, f"node of {work.worker}", ticket, "orchestrator")
        state.split_off(work.worker, state.batches[number].header, leased, place, True)
        state.summon(work.worker, stage.newest(), work)
        names.append(("summons", stage.newest().batch))
    stage.vote(names, ACCEPT, CONVICT)
    for name, work in zip(names, works, strict=True):
        state.settle_summoned(state.batches[int(name[1])].header, work)
    judged = [state.batches[int(name[1])].records for name in names]
    return sum(not records or records[0].verdict != ACCEPTED for records in judged)


def invented(stage: Stage, cases: int) -> int:
    """A quorum accepts invented work; somebody who recomputed it disputes it."""
    works = stage.commit(3, cases)
    proofs = stage.post(works, ACCEPT, stage.quorum)
    names = stage.claim(["stranger"] * cases, proofs, CONVICT)
    stage.vote(names, CONVICT, ACCEPT)
    for proof in proofs:
        stage.state.settle(proof)
    return sum(stage.state.standing(proof).verdict == ACCEPTED for proof in proofs)


def sheltered(stage: Stage, cases: int) -> int:
    """An honest quorum finds fraud; the cheat disputes it and asks for its stake back."""
    works = stage.commit(4, cases)
    proofs = stage.post(works, CONVICT, stage.quorum)
    names = stage.claim([work.worker for work in works], proofs, ACCEPT)
    stage.vote(names, CONVICT, ACCEPT)
    for proof in proofs:
        stage.state.settle(proof)
    return sum(stage.state.standing(proof).verdict != FRAUD for proof in proofs)


def accused(stage: Stage, cases: int) -> int:
    """An honest quorum accepts honest work; the coalition disputes it to have the signers fined."""
    works = stage.commit(5, cases)
    proofs = stage.post(works, ACCEPT, stage.quorum)
    names = stage.claim(["stranger"] * cases, proofs, CONVICT)
    stage.vote(names, ACCEPT, CONVICT)
    broken = 0
    for proof in proofs:
        stage.state.settle(proof)
        try:
            stage.state.fine_signer(proof, stage.seats[0])
        except Refused as refused:
            # Signers are fined once a batch: further overturned outcomes count, at no extra cost.
            broken += refused.name == "VaultOffenceSettled"
        else:
            broken += 1
    return broken


@dataclass(frozen=True)
class Promise:
    """A promise, and the coalition that attacks it."""

    name: str
    needs: str
    """The coalition's members besides jurors, in words."""
    play: Play


PROMISES = (
    Promise("an honest worker keeps its stake", "a quorum", framed),
    Promise("honest work is paid though its run is silent", "the orchestrator", starved),
    Promise("a run pays for no invented work that somebody disputes", "a quorum", invented),
    Promise("a fraud that validators found costs its worker", "nobody", sheltered),
    Promise("an honest validator keeps its stake", "nobody", accused),
)


@dataclass(frozen=True)
class Found:
    """How often a promise broke, by the coalition's share of the bench."""

    promise: Promise
    rates: dict[float, float]

    def breaks_from(self, rate: float) -> float | None:
        """Return the smallest share of the bench at which more than `rate` of the cases broke."""
        return next((share for share, found in self.rates.items() if found > rate), None)


def play_all(
    *, workers: int, validators: int, quorum: int, cases: int, seed: int, fixed: Fixed
) -> tuple[list[Found], float]:
    """Play every promise at every share of the bench.

    Returns how often they broke, and the least share of the validators that records an outcome.
    Raises AssertionError when a play touched stake in the other run, or a smaller share of the
    validators recorded an outcome.
    """
    rates: dict[str, dict[float, float]] = {promise.name: {} for promise in PROMISES}
    for share in SHARES:
        stage = Stage(fixed, workers, validators, quorum, share, Random(f"{seed} {share}"))
        for promise in PROMISES:
            rates[promise.name][share] = promise.play(stage, cases) / cases
            stage.tick(seconds=2 * fixed.judgement_time)
        require_other_run_untouched(stage)
    found = [Found(promise, rates[promise.name]) for promise in PROMISES]
    return found, _least_quorum(fixed, validators, quorum)


def require_other_run_untouched(stage: Stage) -> None:
    """Raise AssertionError when an account lost stake in the other run."""
    for name in stage.people:
        assert stage.staked(OTHER, name) == stage.fixed.required_stake, name
    for name in stage.seats:
        assert stage.staked(OTHER, name) == stage.fixed.required_validator_stake, name


def _least_quorum(fixed: Fixed, validators: int, quorum: int) -> float:
    """Return the least share of the validators whose signatures record an outcome, by trying."""
    stage = Stage(fixed, 1, validators, quorum, 0.0, Random(0))
    works = stage.commit(1, 1)
    for signers in range(1, validators + 1):
        try:
            stage.post(works, CONVICT, signers)
            return signers / validators
        except Refused as refused:
            if refused.name != "LedgerQuorumNotMet":
                raise
    raise AssertionError("no quorum was enough")
