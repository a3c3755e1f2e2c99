"""What the contracts should do, told in plain Python: who holds what, who may work, what runs are.

The model is written from the natspec of `contracts/src/interfaces` and docs/protocol.md. Accounts
are names, hashes are tuples, times and money are integers, and a call that must fail raises
`Refused` with the error's name and arguments. `contracts_model_work` adds what happens to work.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

PPM = 1_000_000
NOBODY = "nobody"
"""The zero address."""
NO_OFFENCE = "no offence"
"""The zero hash."""
NONE, ACTIVE, JAILED, EXITING, BANNED = range(5)
HELD, RELEASED, RESTORED = 1, 2, 3
MAX_SEATS = 88

Name = tuple[Any, ...] | str
"""What stands for a hash: a tag, and what is hashed."""


class Refused(Exception):
    """The call reverts with this error."""

    def __init__(self, name: str, *args: Any) -> None:
        super().__init__(name, args)
        self.name = name
        self.values = args


def need(condition: bool, name: str, *args: Any) -> None:
    if not condition:
        raise Refused(name, *args)


@dataclass(frozen=True)
class Fixed:
    """What a deployment fixes. Small primes and odd shares, so that every rounding shows."""

    required_stake: int = 1009
    required_validator_stake: int = 2003
    activation_delay: int = 3
    jail_time: int = 50
    challenge_window: int = 100
    outcome_deadline: int = 60
    commit_time: int = 40
    reveal_time: int = 30
    draw_delay: int = 2
    jury_size: int = 2
    challenge_bond: int = 53
    wrong_verdict_ppm: int = 50_021
    absence_ppm: int = 5_003
    change_delay: int = 290
    slash_pause: int = 50
    slash_cooldown: int = 107
    claim_period: int = 400
    stake_per_unit: int = 3
    unbonding: int = 300
    insurance_ppm: int = 300_007
    reporter_ppm: int = 200_003
    reporter_cap: int = 97

    @property
    def jury_time(self) -> int:
        return self.commit_time + self.reveal_time

    @property
    def judgement_time(self) -> int:
        return self.outcome_deadline + self.challenge_window + self.jury_time + self.slash_pause


@dataclass
class Stake:
    active: int = 0
    unbonding: int = 0
    withdrawable_at: int = 0
    held_until: int = 0
    open_cases: int = 0


@dataclass
class Escrow:
    owner: str
    reporter: str
    amount: int
    status: int = HELD


@dataclass
class Worker:
    node: str
    number: int
    active_from: int
    status: int = ACTIVE
    nonce: int = 1
    jailed_until: int = 0
    before: int = NONE
    """Status at the first conviction that stands."""
    convictions: list[Name] = field(default_factory=list)
    """Offences that stand."""
    exact: int = 0
    """How many of them count as exact."""


class Terms(NamedTuple):
    price: int
    fraud_ppm: int
    exact_ppm: int
    quorum: int


NO_TERMS = Terms(0, 0, 0, 0)


@dataclass
class Seat:
    bit: int
    seated: bool
    seated_at: int
    unseated_at: int = 0


@dataclass
class Run:
    owner: str
    trainer: str
    orchestrator: str
    terms: Terms
    validators: list[str] = field(default_factory=list)
    seats: dict[str, Seat] = field(default_factory=dict)
    paused: bool = False
    closed_at: int = 0
    proposed: Terms = NO_TERMS
    effective_at: int = 0
    versions: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Manifest and block of every published version."""
    beacons: set[int] = field(default_factory=set)
    slash_paused_until: int = 0

    @property
    def is_open(self) -> bool:
        return not self.paused and not self.closed_at


class Parties:
    """Token, StakeVault, WorkerRegistry and RunRegistry."""

    def __init__(self, fixed: Fixed, now: int, block: int) -> None:
        self.fixed = fixed
        self.now, self.block = now, block
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.balances: dict[str, int] = defaultdict(int)
        self.allowances: dict[tuple[str, str], int] = defaultdict(int)
        self.burned = 0
        self.stakes: dict[str, Stake] = defaultdict(Stake)
        self.escrows: dict[Name, Escrow] = {}
        self.workers: dict[str, Worker] = {}
        self.bound: dict[str, str] = {}
        self.runs: dict[int, Run] = {}

    @contextmanager
    def transaction(self, now: int, block: int) -> Iterator[list[tuple[str, dict[str, Any]]]]:
        """One transaction in a block: all of it happens, or none. Yields its events."""
        self.now, self.block, self.events = now, block, []
        before = copy.deepcopy(self.__dict__)
        try:
            yield self.events
        except Refused:
            self.__dict__.update(before)
            raise

    def emit(self, event: str, **args: Any) -> None:
        self.events.append((event, args))

    # --------------------------------------------------------------------- token

    def _move(self, source: str, to: str, amount: int) -> None:
        need(to != NOBODY, "ERC20InvalidReceiver", NOBODY)
        held = self.balances[source]
        need(amount <= held, "ERC20InsufficientBalance", source, held, amount)
        self.balances[source] -= amount
        self.balances[to] += amount

    def _pull(self, spender: str, source: str, amount: int) -> None:
        allowed = self.allowances[source, spender]
        need(amount <= allowed, "ERC20InsufficientAllowance", spender, allowed, amount)
        if allowed < 2**256 - 1:
            self.allowances[source, spender] -= amount
        self._move(source, spender, amount)

    def _burn(self, source: str, amount: int) -> None:
        assert self.balances[source] >= amount
        self.balances[source] -= amount
        self.burned += amount

    # --------------------------------------------------------------------- stake

    def deposit(self, caller: str, owner: str, amount: int) -> None:
        need(amount > 0, "VaultZeroAmount")
        account = self.stakes[owner]
        account.active += amount
        self.emit("Deposited", owner=owner, amount=amount, active=account.active)
        self._pull("StakeVault", caller, amount)

    def deposit_with_permit(self, caller: str, amount: int, *, signed: bool) -> None:
        if signed:
            self.allowances[caller, "StakeVault"] = amount
        self.deposit(caller, caller, amount)

    def request_unbond(self, caller: str, amount: int) -> None:
        need(amount > 0, "VaultZeroAmount")
        active = self.stakes[caller].active
        need(amount <= active, "VaultInsufficientStake", caller, amount, active)
        self._unbond(caller, amount)
        self._jail_for_low_stake(caller)

    def _unbond(self, owner: str, amount: int) -> None:
        account = self.stakes[owner]
        account.active -= amount
        account.unbonding += amount
        account.withdrawable_at = self.now + self.fixed.unbonding
        self.emit(
            "UnbondRequested",
            owner=owner,
            amount=amount,
            unbonding=account.unbonding,
            withdrawable_at=account.withdrawable_at,
        )

    def withdraw(self, caller: str) -> None:
        account = self.stakes[caller]
        amount, due = account.unbonding, account.withdrawable_at
        need(amount > 0 and self.now >= due, "VaultNotWithdrawable", caller, amount, due)
        held = account.open_cases > 0 or self.now < account.held_until
        outlasted = self.now >= due + self.fixed.unbonding
        need(
            outlasted or not held,
            "VaultStakeHeld",
            caller,
            account.open_cases,
            account.held_until,
        )
        account.unbonding = account.withdrawable_at = 0
        self.emit("Withdrawn", owner=caller, amount=amount)
        self._move("StakeVault", caller, amount)

    def _hold(self, owner: str, until: int) -> None:
        account = self.stakes[owner]
        if until > account.held_until:
            account.held_until = until
            self._emit_held(owner)

    def _count_case(self, owner: str, change: int) -> None:
        self.stakes[owner].open_cases += change
        self._emit_held(owner)

    def _emit_held(self, owner: str) -> None:
        account = self.stakes[owner]
        held = {"held_until": account.held_until, "open_cases": account.open_cases}
        self.emit("StakeHeld", owner=owner, **held)

    def _slash(self, owner: str, ppm: int, offence: Name, reporter: str) -> int:
        need(offence not in self.escrows, "VaultOffenceSettled", offence)
        account = self.stakes[owner]
        # Rounded up.
        active = -(-account.active * ppm // PPM)
        unbonding = -(-account.unbonding * ppm // PPM)
        account.active -= active
        account.unbonding -= unbonding
        self.escrows[offence] = Escrow(owner, reporter, active + unbonding)
        self.emit(
            "Slashed",
            owner=owner,
            offence=offence,
            from_active=active,
            from_unbonding=unbonding,
            reporter=reporter,
        )
        self._jail_for_low_stake(owner)
        return active + unbonding

    def _release(self, offence: Name) -> None:
        escrow = self.escrows.get(offence)
        need(escrow is not None and escrow.status == HELD, "VaultOffenceSettled", offence)
        assert escrow is not None
        escrow.status = RELEASED
        insured = escrow.amount * self.fixed.insurance_ppm // PPM
        rewarded = 0
        if escrow.reporter != NOBODY:
            share = escrow.amount * self.fixed.reporter_ppm // PPM
            rewarded = min(share, self.fixed.reporter_cap)
        burned = escrow.amount - insured - rewarded
        self.emit(
            "SlashReleased", offence=offence, burned=burned, insured=insured, rewarded=rewarded
        )
        self._burn("StakeVault", burned)
        self._move("StakeVault", "insurance", insured)
        if rewarded:
            self._move("StakeVault", escrow.reporter, rewarded)

    def _restore(self, offence: Name) -> None:
        escrow = self.escrows[offence]
        assert escrow.status == HELD
        escrow.status = RESTORED
        self.stakes[escrow.owner].active += escrow.amount
        self.emit("SlashRestored", owner=escrow.owner, offence=offence, amount=escrow.amount)

    # ------------------------------------------------------------------- workers

    def register(
        self, caller: str, stake: int, node: str, deadline: int, *, consents: bool, permit: bool
    ) -> None:
        """With `permit`, a valid ERC-2612 permit for the stake travels along."""
        if permit:
            self.allowances[caller, "StakeVault"] = stake
        need(caller not in self.workers, "RegistryWorkerExists", caller)
        self._check_consent(node, deadline, consents)
        self.bound[node] = caller
        number = len(self.workers) + 1
        active_from = self.block + self.fixed.activation_delay
        self.workers[caller] = Worker(node, number, active_from)
        self.emit(
            "WorkerRegistered",
            worker=caller,
            node=node,
            worker_id=number,
            active_from=active_from,
        )
        if stake:
            self.deposit(caller, caller, stake)
        self._need_stake(caller)

    def rotate_node(self, caller: str, node: str, deadline: int, *, consents: bool) -> None:
        status = self.status_of(caller)
        need(status in (ACTIVE, JAILED), "RegistryWrongStatus", caller, status)
        self._check_consent(node, deadline, consents)
        worker = self.workers[caller]
        self.bound[node] = caller
        self.emit("NodeRotated", worker=caller, old_node=worker.node, new_node=node)
        worker.node = node
        worker.nonce += 1

    def _check_consent(self, node: str, deadline: int, consents: bool) -> None:
        need(self.now <= deadline, "RegistryExpired", deadline, self.now)
        need(node not in self.bound, "RegistryNodeTaken", node, self.bound.get(node))
        # Whoever does not consent signs nothing: the signature is malformed.
        need(consents, "RegistryInvalidNodeSignature", node, NOBODY)

    def _need_stake(self, worker: str) -> None:
        active, least = self.stakes[worker].active, self.fixed.required_stake
        need(active >= least, "RegistryStakeTooLow", worker, active, least)

    def exit(self, caller: str) -> None:
        status = self.status_of(caller)
        need(status in (ACTIVE, JAILED), "RegistryWrongStatus", caller, status)
        self.workers[caller].status = EXITING
        self.emit("WorkerExiting", worker=caller)
        if self.stakes[caller].active:
            self._unbond(caller, self.stakes[caller].active)

    def unjail(self, caller: str) -> None:
        self._come_back(caller, JAILED, "WorkerUnjailed")

    def rejoin(self, caller: str) -> None:
        self._come_back(caller, EXITING, "WorkerRejoined")

    def _come_back(self, caller: str, from_status: int, event: str) -> None:
        status = self.status_of(caller)
        need(status == from_status, "RegistryWrongStatus", caller, status)
        worker = self.workers[caller]
        until = worker.jailed_until
        need(self.now >= until, "RegistryStillJailed", caller, until)
        self._need_stake(caller)
        worker.status = ACTIVE
        worker.active_from = self.block + self.fixed.activation_delay
        self.emit(event, worker=caller, active_from=worker.active_from)

    def _jail_for_low_stake(self, name: str) -> None:
        low = self.stakes[name].active < self.fixed.required_stake
        if low and self.status_of(name) == ACTIVE:
            self._jail(name, NO_OFFENCE)

    jail_for_low_stake = _jail_for_low_stake

    def _jail(self, name: str, offence: Name) -> None:
        worker = self.workers[name]
        if worker.status == ACTIVE:
            worker.status = JAILED
        worker.jailed_until = self.now + self.fixed.jail_time
        self.emit("WorkerJailed", worker=name, offence=offence, until=worker.jailed_until)

    def _convict(self, name: str, offence: Name, exact: bool) -> int:
        """Return the convictions that stood before."""
        worker = self.workers[name]
        priors = len(worker.convictions)
        if not priors:
            worker.before = worker.status
        worker.convictions.append(offence)
        worker.exact += exact
        if exact or priors:
            worker.status = BANNED
            self.emit("WorkerBanned", worker=name, offence=offence)
        else:
            self._jail(name, offence)
        return priors

    def _acquit(self, name: str, offence: Name, exact: bool) -> None:
        """`exact` by the outcome that was overturned: another one may have convicted."""
        worker = self.workers[name]
        worker.convictions.remove(offence)
        worker.exact = min(max(worker.exact - exact, 0), len(worker.convictions))
        if worker.status in (BANNED, JAILED):
            worker.status = self._status_by_convictions(worker)
        if worker.status == ACTIVE and self.stakes[name].active < self.fixed.required_stake:
            worker.status = JAILED
        self.emit("WorkerAcquitted", worker=name, offence=offence, status=worker.status)

    @staticmethod
    def _status_by_convictions(worker: Worker) -> int:
        if not worker.convictions:
            return worker.before
        if len(worker.convictions) > 1 or worker.exact:
            return worker.status
        return EXITING if worker.before == EXITING else JAILED

    def status_of(self, name: str) -> int:
        return self.workers[name].status if name in self.workers else NONE

    def number_of(self, name: str) -> int:
        return self.workers[name].number if name in self.workers else 0

    def by_number(self, number: int) -> str:
        names = [name for name, worker in self.workers.items() if worker.number == number]
        return names[0] if names else NOBODY

    def is_active(self, name: str) -> bool:
        return self.status_of(name) == ACTIVE and self.block >= self.workers[name].active_from

    def serves(self, node: str) -> str:
        """Return the worker that a node serves now."""
        owner = self.bound.get(node, NOBODY)
        return owner if owner in self.workers and self.workers[owner].node == node else NOBODY

    def was_node(self, node: str, name: str, number: int) -> bool:
        return self.bound.get(node) == name and self.number_of(name) == number

    # ---------------------------------------------------------------------- runs

    def create_run(self, caller: str, config: Run) -> None:
        """`config` brings trainer, orchestrator, terms and the validators to be."""
        for key in ("trainer", "orchestrator"):
            need(getattr(config, key) != NOBODY, "RunInvalidParameter", ("text", key))
        self._check_terms(config.terms, len(config.validators))
        number = len(self.runs) + 1
        run = replace(config, owner=caller, validators=[], seats={}, versions={}, beacons=set())
        self.runs[number] = run
        self.emit("RunCreated", run_id=number, owner=caller, config=config)
        for validator in config.validators:
            self._seat(number, validator)

    @staticmethod
    def _check_terms(terms: Terms, validators: int) -> None:
        need(terms.price > 0, "RunInvalidParameter", ("text", "pricePerUnit"))
        need(terms.fraud_ppm <= terms.exact_ppm, "RunInvalidParameter", ("text", "fraudPpm"))
        need(terms.exact_ppm <= PPM, "RunInvalidParameter", ("text", "exactFraudPpm"))
        enough = 0 < terms.quorum <= validators
        need(enough, "RunInvalidQuorum", terms.quorum, validators)

    def _run(self, number: int) -> Run:
        need(number in self.runs, "RunUnknown", number)
        return self.runs[number]

    def _owned(self, caller: str, number: int) -> Run:
        run = self._run(number)
        need(caller == run.owner, "RunUnauthorized", number, caller)
        need(not run.closed_at, "RunEnded", number)
        return run

    def _seat(self, number: int, validator: str) -> None:
        run = self.runs[number]
        seat = run.seats.get(validator)
        free = validator != NOBODY and not (seat and seat.seated)
        staked = self.stakes[validator].active >= self.fixed.required_validator_stake
        room = seat is not None or len(run.seats) < MAX_SEATS
        need(free and staked and room, "RunInvalidValidator", validator)
        bit = seat.bit if seat else 1 << len(run.seats)
        left = seat.unseated_at if seat else 0
        run.seats[validator] = Seat(bit, True, self.now, left)
        run.validators.append(validator)
        self.emit("ValidatorSeated", run_id=number, validator=validator, seat_bit=bit)

    def _unseat(self, number: int, validator: str) -> None:
        run = self.runs[number]
        need(validator in run.validators, "RunInvalidValidator", validator)
        run.seats[validator].seated = False
        run.seats[validator].unseated_at = self.now
        # The last one moves to the place that falls vacant.
        place = run.validators.index(validator)
        last = run.validators.pop()
        if last != validator:
            run.validators[place] = last
        self.emit("ValidatorUnseated", run_id=number, validator=validator)

    def seat_validator(self, caller: str, number: int, validator: str) -> None:
        self._owned(caller, number)
        self._seat(number, validator)

    def rotate_validator(self, caller: str, number: int, old: str, new: str) -> None:
        self._owned(caller, number)
        self._unseat(number, old)
        self._seat(number, new)

    def unseat_validator(self, number: int, validator: str) -> None:
        """By anyone but FaultCourt."""
        low = self.stakes[validator].active < self.fixed.required_validator_stake
        need(low, "RunInvalidValidator", validator)
        self._run(number)
        self._unseat(number, validator)

    def rotate_key(self, caller: str, number: int, role: str, old: str, new: str) -> None:
        """`role` is trainer or orchestrator."""
        run = self._owned(caller, number)
        held = getattr(run, role)
        need(old == held, "RunWrongKey", number, old, held)
        need(new != NOBODY, "RunInvalidParameter", ("text", role))
        setattr(run, role, new)
        named = {f"old_{role}": old, f"new_{role}": new}
        self.emit(f"{role.capitalize()}Rotated", run_id=number, **named)

    def propose_change(self, caller: str, number: int, terms: Terms) -> None:
        run = self._owned(caller, number)
        self._check_terms(terms, len(run.validators))
        bounded = run.terms.price // 2 <= terms.price <= run.terms.price * 2
        need(bounded, "RunInvalidParameter", ("text", "pricePerUnit"))
        run.proposed, run.effective_at = terms, self.now + self.fixed.change_delay
        self.emit("ChangeProposed", run_id=number, terms=terms, effective_at=run.effective_at)

    def cancel_change(self, caller: str, number: int) -> None:
        run = self._owned(caller, number)
        need(run.effective_at > 0, "RunChangeNotDue", number, 0)
        self._forget_change(run)
        self.emit("ChangeCancelled", run_id=number)

    def apply_change(self, number: int) -> None:
        run = self._run(number)
        due = 0 < run.effective_at <= self.now
        need(due, "RunChangeNotDue", number, run.effective_at)
        enough = run.proposed.quorum <= len(run.validators)
        need(enough, "RunInvalidQuorum", run.proposed.quorum, len(run.validators))
        run.terms = run.proposed
        self.emit("ChangeApplied", run_id=number, terms=run.terms)
        self._forget_change(run)

    @staticmethod
    def _forget_change(run: Run) -> None:
        run.proposed, run.effective_at = NO_TERMS, 0

    def publish_checkpoint(self, caller: str, number: int, version: int, manifest: str) -> None:
        run = self._run(number)
        need(caller == run.trainer, "RunUnauthorized", number, caller)
        need(not run.closed_at, "RunEnded", number)
        latest = max(run.versions, default=-1)
        need(version > latest, "RunVersionNotIncreasing", number, version, latest)
        run.versions[version] = (manifest, self.block)
        self.emit(
            "CheckpointPublished",
            run_id=number,
            version=version,
            manifest_root=("manifest", manifest),
        )

    def record_beacon(self, number: int, version: int) -> None:
        """The publishing block can be read while it is one of the last 256."""
        run = self.runs.get(number)
        known = run is not None and version in run.versions
        need(known, "RunVersionUnknown", number, version)
        assert run is not None
        if version in run.beacons:
            return
        published = run.versions[version][1]
        readable = published < self.block <= published + 256
        need(readable, "RunBeaconUnavailable", number, version, published)
        run.beacons.add(version)
        self.emit("BeaconRecorded", run_id=number, version=version, beacon=("block", published))

    def pause(self, caller: str, number: int, paused: bool) -> None:
        self._owned(caller, number).paused = paused
        self.emit("SubmissionsPaused", run_id=number, paused=paused)

    def pause_slashing(self, caller: str, number: int, cause: int, reason: int, why: str) -> None:
        run = self._run(number)
        entitled = (run.owner, run.orchestrator, *run.validators)
        need(caller in entitled, "RunUnauthorized", number, caller)
        need(bool(why), "RunInvalidParameter", ("text", "evidenceHash"))
        last = run.slash_paused_until
        again = last + self.fixed.slash_cooldown
        need(not last or self.now >= again, "RunPauseTooSoon", number, again)
        run.slash_paused_until = self.now + self.fixed.slash_pause
        self.emit(
            "SlashingPaused",
            run_id=number,
            by=caller,
            cause=cause,
            reason=reason,
            evidence_hash=("manifest", why),
            until=run.slash_paused_until,
        )

    def fraud_closes_at(self, number: int, opens_at: int) -> int:
        """Return when the window of a fraud verdict closes, second by second."""
        window, until = self.fixed.challenge_window, self.runs[number].slash_paused_until
        paused = range(until - self.fixed.slash_pause, until) if until else range(0)
        met = any(opens_at <= second < opens_at + window for second in paused)
        return (until if met else opens_at) + window

    def close_run(self, caller: str, number: int) -> None:
        self._owned(caller, number).closed_at = self.now
        self.emit("RunClosed", run_id=number)

    def seat_bit(self, number: int, account: str) -> int:
        run = self.runs.get(number)
        return run.seats[account].bit if run and account in run.seats else 0

    def is_validator(self, number: int, account: str) -> bool:
        run = self.runs.get(number)
        return bool(run and account in run.validators)

    def was_seated(self, number: int, account: str, since: int, until: int) -> bool:
        """Return whether an account held its seat from one time to another without a break."""
        run = self.runs.get(number)
        if run is None or account not in run.seats:
            return False
        seat = run.seats[account]
        return seat.seated_at <= since and (seat.seated or seat.unseated_at >= until)
