"""WorkerRegistry, RunRegistry and JuryPool: who may work and judge, and what runs are."""

from collections import defaultdict

from muster.lab.simulator.model.stakes import Stakes
from muster.lab.simulator.model.words import (
    ACTIVE,
    BANNED,
    BENCH,
    EXITING,
    JAILED,
    MAX_SEATS,
    MAX_VERSION_STEP,
    NO_OFFENCE,
    NO_TERMS,
    NOBODY,
    NONE,
    PPM,
    Fixed,
    Member,
    Name,
    Place,
    Run,
    Seat,
    Terms,
    Worker,
    need,
)

MAX_PASSED = 16
"""Entries about places that were given up, which one search for a free place passes."""


class Parties(Stakes):
    """WorkerRegistry, RunRegistry and JuryPool."""

    def __init__(self, fixed: Fixed, now: int, block: int) -> None:
        super().__init__(fixed, now, block)
        self.workers: dict[str, Worker] = {}
        self.numbered: list[str] = []
        """Workers in the order of their numbers, from 1."""
        self.members: dict[tuple[int, str], Member] = defaultdict(Member)
        self.bound: dict[str, tuple[str, int]] = {}
        """The worker that a node serves or served, and the time at which it stopped."""
        self.runs: dict[int, Run] = {}
        self.bench: list[Place] = []
        self.vacant: list[int] = []
        """Places whose juror left, the first to leave first."""
        self.left_bench: dict[str, int] = {}

    # ------------------------------------------------------------------- workers

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
    ) -> None:
        """With `permit`, the call includes a valid ERC-2612 permit for the stake."""
        self.require_terms(run, terms)
        member = self.members[run, caller]
        stranger = member.status == NONE and not self.is_validator(run, caller)
        need(stranger, "RegistryWrongStatus", run, caller, member.status)
        if caller not in self.workers:
            self.numbered.append(caller)
            self.workers[caller] = Worker(len(self.numbered))
            self.emit("WorkerRegistered", worker=caller, worker_id=len(self.numbered))
        if node != NOBODY:
            self._bind(caller, node, deadline, consents)
        bound = self.workers[caller].node
        need(bound != NOBODY, "RegistryInvalidNodeSignature", NOBODY, NOBODY)
        self._activate(member)
        self.emit(
            "WorkerJoined", run_id=run, worker=caller, terms=terms, active_from=member.active_from
        )
        if permit:
            self.allowances[caller, "StakeVault"] = stake
        if stake:
            self.deposit(caller, run, caller, stake)
        self._need_stake(run, caller)

    def rotate_node(self, caller: str, node: str, deadline: int, *, consents: bool) -> None:
        need(caller in self.workers, "RegistryUnauthorized", caller)
        self._bind(caller, node, deadline, consents)

    def _bind(self, caller: str, node: str, deadline: int, consents: bool) -> None:
        need(self.now <= deadline, "RegistryExpired", deadline, self.now)
        need(node not in self.bound, "RegistryNodeTaken", node, self.bound.get(node, (NOBODY,))[0])
        # Without consent there is no signature, so it counts as malformed.
        need(consents, "RegistryInvalidNodeSignature", node, NOBODY)
        worker = self.workers[caller]
        if worker.node != NOBODY:
            self.bound[worker.node] = (caller, self.now)
            self.emit("NodeUnbound", worker=caller, node=worker.node)
        worker.node = node
        worker.nonce += 1
        self.bound[node] = (caller, 0)
        self.emit("NodeBound", worker=caller, node=node)

    def _activate(self, member: Member) -> None:
        member.status = ACTIVE
        member.left_at = 0
        member.active_from = self.block + self.fixed.activation_delay

    def _need_stake(self, run: int, worker: str) -> None:
        active, least = self.stakes[run, worker].active, self.fixed.required_stake
        need(active >= least, "RegistryStakeTooLow", run, worker, active, least)

    def exit(self, caller: str, run: int) -> None:
        member = self.members[run, caller]
        here = member.status in (ACTIVE, JAILED)
        need(here, "RegistryWrongStatus", run, caller, member.status)
        member.status, member.left_at = EXITING, self.now
        self.emit("WorkerExiting", run_id=run, worker=caller)
        self._unbond_all(run, caller)

    def come_back(self, caller: str, run: int, terms: int) -> None:
        self.require_terms(run, terms)
        member = self.members[run, caller]
        away = member.status in (JAILED, EXITING)
        need(away, "RegistryWrongStatus", run, caller, member.status)
        until = member.jailed_until
        need(self.now >= until, "RegistryStillJailed", run, caller, until)
        self._need_stake(run, caller)
        self._activate(member)
        self.emit(
            "WorkerReturned", run_id=run, worker=caller, terms=terms, active_from=member.active_from
        )

    def jail_for_low_stake(self, run: int, worker: str) -> None:
        low = self.stakes[run, worker].active < self.fixed.required_stake
        if low and self.members[run, worker].status == ACTIVE:
            self._jail(run, worker, NO_OFFENCE)

    def _jail(self, run: int, worker: str, escrow: Name) -> None:
        member = self.members[run, worker]
        if member.status == ACTIVE:
            member.status = JAILED
        member.jailed_until = self.now + self.fixed.jail_time
        until = member.jailed_until
        self.emit("WorkerJailed", run_id=run, worker=worker, escrow_id=escrow, until=until)

    def _convict(self, run: int, worker: str, escrow: Name, exact: bool) -> int:
        """Convict a worker; return the number of its earlier convictions that stand."""
        member = self.members[run, worker]
        need(member.status != NONE, "RegistryWrongStatus", run, worker, member.status)
        priors = member.convictions
        if not priors:
            member.before = member.status
        member.convictions += 1
        member.exact += exact
        if exact or priors:
            member.status = BANNED
            self.emit("WorkerBanned", run_id=run, worker=worker, escrow_id=escrow)
        else:
            self._jail(run, worker, escrow)
        return priors

    def _acquit(self, run: int, worker: str, escrow: Name, exact: bool) -> None:
        member = self.members[run, worker]
        member.convictions -= 1
        member.exact -= exact
        if member.status in (BANNED, JAILED):
            member.status = self._status_by_convictions(member)
        low = self.stakes[run, worker].active < self.fixed.required_stake
        if member.status == ACTIVE and low:
            member.status = JAILED
        self.emit(
            "WorkerAcquitted", run_id=run, worker=worker, escrow_id=escrow, status=member.status
        )

    @staticmethod
    def _status_by_convictions(member: Member) -> int:
        if member.convictions > 1 or member.exact:
            return member.status
        if member.left_at:
            return EXITING
        if not member.convictions:
            return member.before
        return EXITING if member.before == EXITING else JAILED

    def number_of(self, name: str) -> int:
        return self.workers[name].number if name in self.workers else 0

    def by_number(self, number: int) -> str:
        return self.numbered[number - 1] if 0 < number <= len(self.numbered) else NOBODY

    def is_active(self, run: int, name: str) -> bool:
        member = self.members[run, name]
        return member.status == ACTIVE and self.block >= member.active_from

    def serves(self, node: str) -> str:
        """Return the worker that a node serves now."""
        owner, until = self.bound.get(node, (NOBODY, 0))
        return NOBODY if until else owner

    def answers_for(self, run: int, worker: str, node: str, time: int) -> bool:
        """Return whether a worker is liable for a node's signature on work committed at `time`; at
        0, whether it joined and the key was ever its own.
        """
        owner, until = self.bound.get(node, (NOBODY, 0))
        member = self.members[run, worker]
        served = worker != NOBODY and owner == worker and (not until or until >= time)
        return served and member.status != NONE and (not member.left_at or member.left_at >= time)

    # ---------------------------------------------------------------------- runs

    def create_run(self, caller: str, config: Run) -> None:
        """`config` holds trainer, orchestrator, terms and the invited validators."""
        for key in ("trainer", "orchestrator"):
            need(getattr(config, key) != NOBODY, "RunInvalidParameter", ("text", key))
        self._check_terms(config.terms)
        number = len(self.runs) + 1
        keys = (caller, config.trainer, config.orchestrator, config.terms)
        self.runs[number] = Run(*keys, all_terms=[config.terms])
        self.emit("RunCreated", run_id=number, owner=caller, config=config)
        for validator in config.validators:
            self._invite(number, validator, True)

    @staticmethod
    def _check_terms(terms: Terms) -> None:
        need(terms.price > 0, "RunInvalidParameter", ("text", "pricePerUnit"))
        need(terms.fraud_ppm <= terms.exact_ppm, "RunInvalidParameter", ("text", "fraudPpm"))
        need(terms.exact_ppm <= PPM, "RunInvalidParameter", ("text", "exactFraudPpm"))
        enough = 0 < terms.quorum <= MAX_SEATS
        need(enough, "RunInvalidQuorum", terms.quorum, MAX_SEATS)

    def _run(self, number: int) -> Run:
        need(number in self.runs, "RunUnknown", number)
        return self.runs[number]

    def _owned(self, caller: str, number: int) -> Run:
        run = self._run(number)
        need(caller == run.owner, "RunUnauthorized", number, caller)
        need(not run.closed_at, "RunEnded", number)
        return run

    def require_terms(self, number: int, terms: int) -> None:
        run = self._run(number)
        need(not run.closed_at, "RunEnded", number)
        present = len(run.all_terms)
        steady = terms == present and not run.effective_at
        need(steady, "RunTermsChanged", number, terms, present, run.effective_at)

    def terms_of(self, number: int) -> Terms:
        return self.runs[number].all_terms[-1]

    def terms_at(self, number: int, terms: int) -> Terms:
        return self.runs[number].all_terms[terms - 1]

    def invite(self, caller: str, number: int, validator: str, invited: bool) -> None:
        self._owned(caller, number)
        self._invite(number, validator, invited)

    def _invite(self, number: int, validator: str, invited: bool) -> None:
        need(validator != NOBODY, "RunInvalidValidator", number, validator)
        run = self.runs[number]
        (run.invited.add if invited else run.invited.discard)(validator)
        self.emit("ValidatorInvited", run_id=number, validator=validator, invited=invited)

    def dismiss(self, caller: str, number: int, validator: str) -> None:
        run = self._owned(caller, number)
        present = validator in run.invited or validator in run.validators
        need(present, "RunInvalidValidator", number, validator)
        self._invite(number, validator, False)
        if self.is_validator(number, validator):
            self._unseat(number, validator)

    def take_seat(self, caller: str, number: int, terms: int, stake: int) -> None:
        self.require_terms(number, terms)
        run = self.runs[number]
        free = caller in run.invited and caller not in run.validators
        free = free and self.members[number, caller].status == NONE
        free = free and (caller in run.seats or len(run.seats) < MAX_SEATS)
        need(free, "RunInvalidValidator", number, caller)
        seat = run.seats.setdefault(caller, Seat(1 << len(run.seats), self.now))
        run.validators.append(caller)
        self.emit(
            "ValidatorSeated", run_id=number, validator=caller, seat_bit=seat.bit, terms=terms
        )
        if stake:
            self.deposit(caller, number, caller, stake)
        active, least = self.stakes[number, caller].active, self.fixed.required_validator_stake
        need(active >= least, "RunStakeTooLow", number, caller, active, least)

    def leave_seat(self, caller: str, number: int) -> None:
        self._run(number)
        self._unseat(number, caller)
        self._unbond_all(number, caller)

    def _unseat_for_fault(self, number: int, validator: str) -> None:
        self.runs[number].invited.discard(validator)
        if self.is_validator(number, validator):
            self._unseat(number, validator)

    def unseat_for_low_stake(self, run: int, validator: str) -> None:
        low = self.stakes[run, validator].active < self.fixed.required_validator_stake
        if low and self.is_validator(run, validator):
            self._unseat(run, validator)

    def _unseat(self, number: int, validator: str) -> None:
        run = self.runs[number]
        need(validator in run.validators, "RunInvalidValidator", number, validator)
        # The last validator moves to the vacant place.
        place = run.validators.index(validator)
        last = run.validators.pop()
        if last != validator:
            run.validators[place] = last
        self.emit("ValidatorUnseated", run_id=number, validator=validator)

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
        self._check_terms(terms)
        price = run.all_terms[-1].price
        bounded = price // 2 <= terms.price <= price * 2
        need(bounded, "RunInvalidParameter", ("text", "pricePerUnit"))
        run.proposed, run.effective_at = terms, self.now + self.fixed.change_delay
        self.emit("ChangeProposed", run_id=number, terms=terms, effective_at=run.effective_at)

    def cancel_change(self, caller: str, number: int) -> None:
        run = self._owned(caller, number)
        need(run.effective_at > 0, "RunChangeNotDue", number, 0)
        run.proposed, run.effective_at = NO_TERMS, 0
        self.emit("ChangeCancelled", run_id=number)

    def apply_change(self, number: int) -> None:
        run = self._run(number)
        due = 0 < run.effective_at <= self.now
        need(due, "RunChangeNotDue", number, run.effective_at)
        run.all_terms.append(run.proposed)
        run.proposed, run.effective_at = NO_TERMS, 0
        named = {"number": len(run.all_terms), "terms": run.all_terms[-1]}
        self.emit("ChangeApplied", run_id=number, **named)

    def publish_checkpoint(self, caller: str, number: int, version: int, manifest: str) -> None:
        run = self._run(number)
        need(caller == run.trainer, "RunUnauthorized", number, caller)
        need(not run.closed_at, "RunEnded", number)
        latest = max(run.versions, default=-1)
        need(version > latest, "RunVersionNotIncreasing", number, version, latest)
        latest = max(latest, 0)
        far = version > latest + MAX_VERSION_STEP
        need(not far, "RunVersionTooFar", number, version, latest)
        run.versions[version] = (manifest, self.block)
        self.emit(
            "CheckpointPublished",
            run_id=number,
            version=version,
            manifest_root=("manifest", manifest),
        )

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

    # --------------------------------------------------------------------- bench

    def join_bench(self, caller: str, stake: int) -> None:
        need(self._place_of(caller) is None, "PoolWrongStatus", caller, True)
        held_until = self.left_bench.get(caller, 0) + self.fixed.commit_time
        back = caller not in self.left_bench or self.now > held_until
        need(back, "PoolPlaceHeld", caller, held_until)
        free = self._find_free()
        if free is not None:
            self.vacant.pop(0)
        self._sit(caller, len(self.bench) if free is None else free)
        if stake:
            self.deposit(caller, BENCH, caller, stake)
        active, least = self.stakes[BENCH, caller].active, self.fixed.required_juror_stake
        need(active >= least, "PoolStakeTooLow", caller, active, least)

    def _sit(self, juror: str, place: int) -> None:
        self.bench[place:] = [Place(juror, self.now), *self.bench[place + 1 :]]
        self.emit("JurorJoined", juror=juror, place=place)

    def _find_free(self) -> int | None:
        """Return the place vacated first if no open case may draw who left."""
        for _ in range(MAX_PASSED):
            if not self.vacant:
                return None
            place = self.vacant[0]
            if place < len(self.bench) and self.bench[place].left_at:
                return place if self._is_free(place) else None
            self.vacant.pop(0)
        return None

    def _is_free(self, place: int) -> bool:
        left_at = self.bench[place].left_at
        return bool(left_at) and self.now > left_at + self.fixed.commit_time

    def shorten_bench(self, most: int) -> None:
        before = len(self.bench)
        while self.bench and before - len(self.bench) < most and self._is_free(len(self.bench) - 1):
            self.bench.pop()
        if len(self.bench) < before:
            self.emit("BenchShortened", places=len(self.bench))
        for place in range(len(self.bench) - 1, max(-1, len(self.bench) - 1 - most), -1):
            if self.bench[place].left_at:
                continue
            free = self._find_free()
            if free is None or free >= place:
                return
            self.vacant.pop(0)
            juror = self.bench[place].juror
            self._vacate(place)
            self._sit(juror, free)

    def _place_of(self, account: str) -> int | None:
        for number, place in enumerate(self.bench):
            if place.juror == account and not place.left_at:
                return number
        return None

    def leave_bench(self, caller: str) -> None:
        need(self._place_of(caller) is not None, "PoolWrongStatus", caller, False)
        self._retire(caller)
        self._unbond_all(BENCH, caller)

    def retire_for_low_stake(self, juror: str) -> None:
        low = self.stakes[BENCH, juror].active < self.fixed.required_juror_stake
        if low and self._place_of(juror) is not None:
            self._retire(juror)

    def _retire(self, juror: str) -> None:
        place = self._place_of(juror)
        assert place is not None
        self.left_bench[juror] = self.now
        self._vacate(place)

    def _vacate(self, place: int) -> None:
        self.bench[place].left_at = self.now
        self.vacant.append(place)
        self.emit("JurorLeft", juror=self.bench[place].juror, place=place)

    def may_be_drawn(self, account: str, opened_at: int) -> bool:
        here = self._place_of(account) is not None
        return here or self.left_bench.get(account, 0) >= opened_at
