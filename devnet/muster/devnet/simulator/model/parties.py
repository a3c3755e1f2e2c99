"""WorkerRegistry and RunRegistry: who may work, and what runs are."""

from __future__ import annotations

from dataclasses import replace

from muster.devnet.simulator.model.stakes import Stakes
from muster.devnet.simulator.model.words import (
    ACTIVE,
    BANNED,
    EXITING,
    JAILED,
    MAX_SEATS,
    NO_OFFENCE,
    NO_TERMS,
    NOBODY,
    NONE,
    PPM,
    Fixed,
    Name,
    Run,
    Seat,
    Terms,
    Worker,
    need,
)


class Parties(Stakes):
    """WorkerRegistry and RunRegistry."""

    def __init__(self, fixed: Fixed, now: int, block: int) -> None:
        super().__init__(fixed, now, block)
        self.workers: dict[str, Worker] = {}
        self.numbered: list[str] = []
        """Workers in the order of their numbers, from 1."""
        self.bound: dict[str, str] = {}
        self.runs: dict[int, Run] = {}

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
        self.numbered.append(caller)
        number = len(self.numbered)
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
        return self.numbered[number - 1] if 0 < number <= len(self.numbered) else NOBODY

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
