"""The worker, from lease to settlement. One rollout's way through Muster (docs/architecture.md):

 1. publish    the trainer anchors a policy version on chain
 2. broadcast  relays mirror its chunks
 3. fetch      HERE  pull the policy, verified against the root on chain
 4. lease      HERE  ask for a ticket, and check it against the chain
 5. generate   HERE  sample what the ticket derives, with proofs, and grade it
 6. submit     HERE  journal and sign one file, and upload it (muster.client.worker.uploads)
 7. validate   validators check it and sign the outcome
 8. record     the orchestrator posts the outcomes of a batch
 9. train      the trainer learns from accepted files
10. settle     HERE  note each outcome (muster.client.worker.outcomes); `muster rewards claim` pays
11. dispute    HERE  dispute a verdict of fraud on honest work (muster.client.worker.defence)
12. audit      anyone rebuilds all of it from the chain

The loop trusts nobody: tickets, documents and policies are checked against the chain.
`muster.client.worker.silence` handles work that nobody commits or judges. The loop survives outages
of the orchestrator, the relays and the chain. `work_once` is its order of work. Simulators,
adversaries and trap workers override a few of its methods, such as `generate` and `claim`.

A loop works on one ticket after the other. Two loops share an engine, so that one leases, fetches,
grades and uploads while the other generates, and samples of one fill the batch rows that the other
frees. The first loop of a node also settles and disputes for all its loops (`helpers`), in a task
beside the work: an upload or a fetch that never ends delays no dispute. Their shared state is in
`muster.client.worker.context`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path

from muster.api import Lease, NoWork
from muster.chain import Event
from muster.client.chain_facts import is_over, ticket_terms
from muster.client.hardware import measure, report
from muster.client.outage import SURVIVED, Outages, serve_forever
from muster.client.tickets import TicketFault, lease_fault
from muster.client.validator.checks import ClaimedWork, FailedCheck
from muster.client.validator.judging import examine, say_list_fault
from muster.client.worker.context import (
    REACH,
    TICKET_PAUSE_S,
    Hope,
    Hopeless,
    Policy,
    WorkerContext,
)
from muster.client.worker.defence import Defence
from muster.client.worker.generation import (
    Ungraded,
    play_ticket,
    require_sound,
    require_sound_policy,
    submission_of,
    ticket_samples,
)
from muster.client.worker.journal import fields_of, slot_of
from muster.client.worker.outcomes import Outcomes
from muster.client.worker.standing import require_good_standing
from muster.client.worker.uploads import Uploads
from muster.lifecycle import ComputeThread, run_beside, uptime_s
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import file_hash
from muster.protocol.errors import (
    ApiError,
    ChainError,
    ConfigError,
    EngineError,
    MusterError,
    PolicyBroken,
    TaskError,
)
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.messages import Submission, Ticket
from muster.protocol.rollouts import Rollout, decode_rollouts, encode_rollouts

logger = logging.getLogger(__name__)

SOFTWARE = f"muster-rl {metadata.version('muster-rl')}"
"""Name and version that the worker reports."""
OUTCOMES_S = 3600.0
"""Seconds after a run's end during which outcomes are awaited."""
PATIENCE_FACTOR = 5
"""Factor on the pause of a loop without a ticket while another loop of the node works."""
STATES = ("generating", "fetching", "grading", "uploading", "idle")
"""Activities of loops; of several, the first in this list is shown for the node."""

NO_TICKET_HINTS = {
    "unit_cap": "its stake covers no more units: add stake, or wait until outcomes are final",
    "share": (
        "it holds its share of the tickets: wait until they are judged or lapse, an "
        "hour at most; accepted work earns a larger share"
    ),
    "chain_away": "the orchestrator's chain endpoint does not answer: its owner must see to that",
    "unfunded": "the run cannot pay at the moment: its owner must fund it",
    "hardware_unknown": "the next heartbeat tells the orchestrator what this machine has",
    "hardware_short": "the run asks for more memory than this machine has: muster doctor",
    "too_slow": (
        "the run asks for more units per second than this machine makes: it tries again in an hour"
    ),
}
"""Hints by the orchestrator's reason for giving no ticket."""


class WorkerLoop:
    """One node of one worker, or one of its loops."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.held = context.held
        self.station = context.station
        self.compute = ComputeThread()
        self.helpers: tuple[WorkerLoop, ...] = ()
        """The node's other loops, which do nothing but work on tickets."""
        self.state = "starting"
        self.uploads = Uploads(context)
        self.outcomes = Outcomes(context)
        self._ticket_signature = b""
        self._due_at = float("inf")
        self._has_resumed = False
        self._over_since: float | None = None
        self.defence = Defence(context, self._arrives, self._recheck)
        self._no_ticket_because: str | None = None
        self._woken = asyncio.Event()
        self._published = asyncio.Event()

    async def run(self) -> None:
        """Work until the run is over and all submissions are judged, or until cancelled.

        Raises MusterError once the worker may not work any more.
        """
        self.outcomes.read(sorted(self.context.view.batches))
        try:
            helping = (helper.help() for helper in self.helpers)
            settling = serve_forever(self.settle, self.context.poll_s)
            await run_beside(
                self._work(), settling, self._heartbeat(), self._keep_fetched(), *helping
            )
        finally:
            for each in self.loops:
                each.compute.close()
            await self.defence.close()

    def take_helpers(self, helpers: Iterable[WorkerLoop]) -> None:
        """Add other loops of this node, which also work on tickets."""
        self.helpers = tuple(helpers)

    @property
    def loops(self) -> tuple[WorkerLoop, ...]:
        """All loops of the node, this one first."""
        return (self, *self.helpers)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all the node's engines."""
        return sum(each.tokens_per_s for each in {loop.station for loop in self.loops})

    @property
    def doing(self) -> str:
        """The node's activity in a word."""
        states = {loop.state for loop in self.loops}
        return next((each for each in STATES if each in states), self.state)

    async def on_change(self, events: list[Event]) -> None:
        """Note new events of the chain."""
        self.outcomes.read(e.args["batch_id"] for e in events if e.name == "OutcomesPosted")
        self._published.set()
        for each in self.loops:
            each._woken.set()

    @property
    def policy_version(self) -> PolicyVersion | None:
        """The policy that is loaded."""
        return self.station.loaded[0] if self.station.loaded else None

    async def _work(self) -> None:
        while not self._has_ended():
            await self._rest(await self._round())
        run, waiting = self.context.run_id, len(self.context.unfinished)
        logger.info("run complete", extra={"run_id": run, "without_outcome": waiting})

    async def help(self) -> None:
        """Work on tickets beside the node's first loop until cancelled."""
        while True:
            # When there is no work, only one of a node's loops asks for it.
            is_idle = self._is_over() or not self.held.tickets
            await self._rest(self._idle() if is_idle else await self._try_work())

    async def _rest(self, pause: float) -> None:
        # News from the chain may mean work, but the orchestrator needs a moment to see it too.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._woken.wait()
                await asyncio.sleep(self.context.poll_s)
        self._woken.clear()

    def _has_ended(self) -> bool:
        """Return whether there is nothing left to do in this run."""
        if self.context.keep_going or not self._is_over():
            self._over_since = None
            return False
        now = time.monotonic()  # who sleeps through the end still settles what waits for it
        self._over_since = self._over_since or now
        longest_s, is_done = OUTCOMES_S, not self.context.unfinished
        if self.held.silence is not None:
            longest_s += self.held.silence.longest_s
            is_done = is_done and self.held.silence.is_done()
        return is_done or now - self._over_since > longest_s

    def _is_over(self) -> bool:
        context = self.context
        return is_over(context.run, context.rules.recipe.training.steps)

    async def _round(self) -> float:
        """Note outcomes, work on at most one ticket, and survive outages."""
        try:
            await self.outcomes.note()
            if not self._has_resumed:
                self.state = "uploading"
                await self.uploads.resume()
                self._has_resumed = True
            await self._require_good_standing()
        except SURVIVED as error:
            await asyncio.sleep(self.held.outages.failed(error))
            return 0.0
        return self._idle() if self._is_over() else await self._try_work()

    async def _try_work(self) -> float:
        try:
            pause = await self.work_once()
        except SURVIVED as error:
            await asyncio.sleep(self.held.outages.failed(error))
            return 0.0
        self.held.outages.recovered()
        return pause

    def _idle(self) -> float:
        self.state = "idle"
        return self.context.poll_s

    async def work_once(self) -> float:
        """Work on at most one ticket; return how many seconds to wait before the next."""
        held = self.held
        if held.fault is not None:
            return self._idle()
        if pause := self._pause_of_slowness():
            return pause
        async with held.asking:
            lease = await self.lease()
            fault = None if isinstance(lease, NoWork) else await self._fault(lease)
            if isinstance(lease, Lease) and fault is None:
                held.tickets.append(lease.ticket)
        if isinstance(lease, NoWork):
            return await self._idle_without(lease)
        if fault is not None:
            return self._refuse(lease.ticket, fault)
        try:
            return await self._work_on(lease)
        finally:
            held.tickets.remove(lease.ticket)

    async def _work_on(self, lease: Lease) -> float:
        ticket = lease.ticket
        if signed := self.context.journal.signed(ticket):
            self.state = "uploading"
            await self.uploads.again(signed)
            # Pause even if the upload was accepted: an orchestrator may give the same ticket
            # forever.
            return self.held.refusals.failed(
                ConfigError("its slot was signed before, and sent again")
            )
        self.held.refusals.recovered()
        self._ticket_signature = lease.signature
        try:
            rollouts = await self.generate(ticket)
        except TaskError as error:
            fields = {**fields_of(ticket), "error": str(error), "hint": error.hint}
            logger.warning("ticket left to lapse", extra=fields)
            if not isinstance(error, Hopeless):
                # Seeds are derived: the same answers would come again.
                self.held.lapsing.append(ticket)
            return TICKET_PAUSE_S
        await self.submit(ticket, rollouts)
        return 0.0

    # 3. fetch

    @asynccontextmanager
    async def policy(self, version: PolicyVersion, root: Hash32) -> AsyncIterator[None]:
        """Keep a policy version loaded, verified against the root on chain.

        It is fetched while other loops still use another version. Raises EngineError when its
        self-check fails; then it is loaded again. Raises PolicyBroken, and does not load it, when
        its weights are not finite.
        """
        folder = None
        if self.context.engine.policy_version is None:
            # An engine in a process of its own that died may fail to open its policy again.
            self.station.loaded = None
        if self.station.loaded != (version, root):
            self.state = "fetching"
            folder = await self._fetched(version, root)

        async def load() -> None:
            await self.load(folder or await self._fetched(version, root), version)

        async with self.station.holding((version, root), load):
            yield

    async def _fetched(self, version: PolicyVersion, root: Hash32) -> Path:
        """Return a version's folder; raises PolicyBroken when its weights are not finite."""
        folder = await self.context.fetcher.fetch(self.context.run_id, version, root)
        await self.held.policies.require(root, version, folder)
        return folder

    async def load(self, folder: Path, version: PolicyVersion) -> None:
        """Load a policy's folder into the idle engine, and run the self-check."""
        await self.compute.run(self.context.engine.load_policy, folder, version)
        say_list_fault(self.context.rules, self.context.engine)
        await self.compute.run(require_sound_policy, self.context.rules, self.context.engine)

    def _newest(self) -> Policy | None:
        run = self.context.run
        if run.latest_version is None:
            return None
        return run.latest_version, run.checkpoints[run.latest_version].manifest_root

    async def _prefetch(self) -> None:
        """Load the newest policy once it is fetched, if the engine is idle."""
        newest = self._newest()
        if newest and newest == self.held.fetched and not self.station.is_held:
            async with self.policy(*newest):
                pass

    async def _keep_fetched(self) -> None:
        """Fetch each version once it is on chain, while the loops continue with the one before."""
        held, outages = self.held, Outages()
        while True:
            self._published.clear()
            newest = self._newest()
            if newest is not None and newest != held.fetched and not self._is_over():
                try:
                    with contextlib.suppress(PolicyBroken):  # whoever needs it says so
                        await self._fetched(*newest)
                except SURVIVED as error:
                    await asyncio.sleep(outages.failed(error))
                    continue
                outages.recovered()
                held.fetched = newest
            # Events may be missed, and a check is cheap.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.context.heartbeat_s):
                    await self._published.wait()

    def version_at_hand(self) -> PolicyVersion | None:
        """Return the version to continue with while a newer one is fetched; None for the newest."""
        loaded, newest = self.station.loaded, self._newest()
        if loaded is None or newest in (None, loaded, self.held.fetched):
            return None
        return loaded[0]

    # 4. lease

    async def lease(self) -> Lease | NoWork:
        """Return an unchecked ticket, or when to ask again."""
        context = self.context
        version = self.version_at_hand()
        return await context.api.lease(context.run_id, await self._not_wanted(), version=version)

    async def _not_wanted(self) -> list[Ticket]:
        """Return the tickets that must not be given out again: those in progress, and those that
        are left to lapse.
        """
        held = self.held
        if held.lapsing:
            now = await self.context.now()
            return held.tickets + [ticket for ticket in held.lapsing if ticket.deadline > now]
        return held.tickets

    def _pause_of_slowness(self) -> float:
        """Return the pause in seconds if another ticket would not be done in time, else 0."""
        station, lease_s = self.station, self.held.lease_s
        if station.reaches(lease_s):
            return 0.0
        if station.waiting:
            return self._idle()
        # Tickets may change, so one is tried again.
        takes_s = station.takes_s
        station.forget_speed()
        self._idle()
        return self.held.slowness.failed(
            ConfigError(
                f"a ticket of this run takes this machine about {takes_s:,.0f} s, and must be done "
                f"in {REACH:.0%} of the {lease_s:,.0f} s that it is given",
                hint="use a faster machine or --dtype bfloat16; or ask the run's owner for "
                "longer leases (orchestrator run --lease-s) or smaller submissions in "
                "the next recipe",
            )
        )

    async def _idle_without(self, answer: NoWork) -> float:
        """Note that there is no ticket; return how many seconds to wait before the next try."""
        if self.held.tickets:
            # Another loop of this node is working, and asks again when it is done.
            return max(answer.retry_after_s * PATIENCE_FACTOR, self._idle())
        self._note_reason(answer.reason)
        await self._prefetch()
        return max(answer.retry_after_s, self._idle())

    def _note_reason(self, reason: str | None) -> None:
        """Log once why there is work but no ticket."""
        if reason is not None and reason != self._no_ticket_because:
            hint = NO_TICKET_HINTS.get(reason)
            logger.warning("no ticket for this worker", extra={"reason": reason, "hint": hint})
        self._no_ticket_because = reason

    async def _fault(self, lease: Lease) -> TicketFault | None:
        context, now = self.context, await self.context.now()
        terms = ticket_terms(
            context.view,
            context.run_id,
            context.domain,
            lease.ticket.policy_version,
            context.worker,
            context.run.config.orchestrator,
        )
        if slot_of(lease.ticket) in map(slot_of, context.held.tickets):
            # Two files for one slot would be a fraud, whichever policies they are of.
            return TicketFault.SLOT_HELD
        earlier = context.journal.signed(lease.ticket)
        signed = earlier.ticket if earlier else None
        fault = lease_fault(lease.ticket, lease.signature, terms, now=now, signed=signed)
        if fault is None:
            left_s = lease.ticket.deadline - now
            self._due_at = uptime_s() + left_s
            # A ticket that is given again has less time left than the full lease.
            context.held.lease_s = max(context.held.lease_s or 0.0, left_s)
        return fault

    def _refuse(self, ticket: Ticket, fault: TicketFault) -> float:
        if fault is TicketFault.POLICY_UNKNOWN:
            # The orchestrator may be a block ahead of this node.
            logger.debug("ticket ahead of the chain view", extra=fields_of(ticket))
            return self.context.poll_s
        return self.held.refusals.failed(ConfigError(f"ticket refused: {fault}"))

    # 5. generate

    async def generate(self, ticket: Ticket) -> list[Rollout]:
        """Return the ticket's rollouts, by its policy.

        Raises EngineError when the self-check fails, TaskError when they cannot be graded or would
        not be done in time.
        """
        station = self.station
        station.waiting += 1
        try:
            async with self.policy(ticket.policy_version, ticket.policy_root):
                self.state = "generating"
                with station.at_work(ticket) as busy_s:
                    played = await self._play(ticket)
                    station.tokens_per_s = played.tokens / max(busy_s(), 1e-9)
                    await self.check(played.rows, busy_s())
                    took_s = busy_s()
                station.took(took_s)
        finally:
            station.waiting -= 1
        logger.info(
            "ticket generated",
            extra={**fields_of(ticket), "tokens": played.tokens, "busy_s": round(took_s, 3)},
        )
        self.held.slowness.recovered()
        self.state = "grading"
        return await self.compute.run(played.graded)

    async def _play(self, ticket: Ticket) -> Ungraded:
        context, station, rules = self.context, self.station, self.context.rules
        hope = Hope(ticket_samples(rules.recipe), self._due_at, lambda: station.is_first(ticket))
        try:
            return await self.compute.run(
                play_ticket, ticket, rules.recipe, rules.task_set, context.engine, hope
            )
        except Hopeless as error:
            station.took(error.takes_s)
            raise

    async def check(self, rollouts: list[Rollout], generating_s: float) -> None:
        """Raise EngineError when the self-check of the new rollouts fails."""
        context = self.context
        try:
            await self.compute.run(
                require_sound, rollouts, context.rules, context.engine, generating_s
            )
        except EngineError:
            # The weights may be corrupted: they are loaded again before the next try.
            self.station.loaded = None
            raise

    # 6. submit

    async def submit(self, ticket: Ticket, rollouts: list[Rollout]) -> None:
        """Journal, sign and upload the rollouts, unless their time is over."""
        if self.held.fault is not None:
            logger.warning("ticket left to lapse, nothing more is signed", extra=fields_of(ticket))
            return
        if await self._has_lapsed(ticket):
            # The machine slept or is too slow. Unsigned work can be leased again.
            logger.warning("ticket left to lapse, its time is over", extra=fields_of(ticket))
            return
        data = await self.compute.run(encode_rollouts, rollouts)
        submission = self.claim(ticket, rollouts, file_hash(data))
        signed = await asyncio.to_thread(
            self.context.journal.record, ticket, self._ticket_signature, submission, data
        )
        self.state = "uploading"
        if signed.submission == submission:
            await self.uploads.send(signed, data)
        else:
            await self.uploads.again(signed)

    async def _has_lapsed(self, ticket: Ticket) -> bool:
        try:
            return await self.context.now() > ticket.deadline
        except ChainError:
            # The work is done: the orchestrator decides whether it is in time.
            return False

    def claim(self, ticket: Ticket, rollouts: list[Rollout], data_hash: Hash32) -> Submission:
        """Return the submission to sign for a file of rollouts."""
        return submission_of(ticket, rollouts, data_hash, self.context.rules.recipe)

    # 10. settle

    async def settle(self) -> None:
        """Note new outcomes, and dispute the verdicts of fraud."""
        await self.outcomes.note()
        await self.defence.serve()

    # 11. dispute

    async def _arrives(self, policy: Policy) -> None:
        if self.station.loaded != policy:
            await self._fetched(*policy)

    async def _recheck(self, claim: ClaimedWork, data: bytes) -> FailedCheck | None:
        """Apply the validators' checks 2 to 7 to work of this node."""
        assert claim.ticket is not None  # check 1
        rows = await self.compute.run(decode_rollouts, data)
        context, ticket = self.context, claim.ticket
        async with self.policy(ticket.policy_version, ticket.policy_root):
            judgement = await self.compute.run(examine, claim, rows, context.rules, context.engine)
        return judgement.finding

    # Standing and heartbeats

    def require_good_standing(self) -> None:
        """Raise MusterError when this node may not work, by the chain or by its journal."""
        context = self.context
        if self.held.fault is not None:
            raise self.held.fault
        require_good_standing(context.view, context.run_id, context.worker, address_of(context.key))

    def _may_work(self) -> bool:
        try:
            self.require_good_standing()
        except MusterError:
            return False
        return True

    async def _require_good_standing(self) -> None:
        """Like `require_good_standing`, but only after its work is judged, and its own bonds and
        cases are over. Work goes on as soon as it may: an acquittal or more stake ends jail."""
        try:
            self.require_good_standing()
        except MusterError as error:
            if self.held.silence is None or not await self.held.silence.is_needed():
                raise
            fields = {"error": str(error)}
            logger.warning("no more work, staying for own work, bonds and cases", extra=fields)
            self.state = "idle"
            await self.held.silence.until_done(self._may_work)
            self.require_good_standing()

    async def _heartbeat(self) -> None:
        context = self.context
        machine = await asyncio.to_thread(measure)
        wants_hardware = True
        while True:
            said = (
                report(machine, context.run_id, context.key, context.domain)
                if wants_hardware
                else None
            )
            try:
                answer = await context.api.heartbeat(
                    context.run_id,
                    policy_version=self.policy_version,
                    state=self.doing,
                    software=SOFTWARE,
                    hardware=said,
                )
                wants_hardware = answer.wants_hardware
            except ApiError as error:
                # Leasing reports outages; a missed heartbeat is harmless.
                logger.debug("heartbeat failed", extra={"code": error.code})
            await asyncio.sleep(self.context.heartbeat_s)
