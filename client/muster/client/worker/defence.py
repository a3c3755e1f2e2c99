"""A worker's defence against verdicts of fraud, step 11 of its loop.

It judges the accused work again with the validators' own checks. It claims whatever they find here
before the network's jurors, unless that is a fraud, too. An accusation stays until it is claimed,
conceded, or can be disputed no more: whatever fails before is tried again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from muster.chain import ClaimView
from muster.chain.structs import CommittedWork
from muster.client.chain_facts import entry_of
from muster.client.disputes.claims import claim
from muster.client.disputes.rerun import claim_of
from muster.client.outage import SURVIVED
from muster.client.validator.checks import ClaimedWork, FailedCheck, check_claim
from muster.client.worker.context import Policy, WorkerContext
from muster.client.worker.outcomes import Judged
from muster.client.worker.silence import SilenceDuty
from muster.lifecycle.outage import Outage
from muster.protocol.errors import ConfigError, ContractRevert
from muster.protocol.ids import Hash32
from muster.protocol.jury import Ruling, is_same
from muster.protocol.messages import Reason, Verdict

logger = logging.getLogger(__name__)

CONTEST_S = 300.0
"""Longest time in seconds that one try waits for the policy of accused work to arrive."""
CLAIM_S = 300.0
"""Longest time in seconds for a claim."""
HONEST = Ruling(Verdict.ACCEPTED, Reason.NONE)
"""The ruling about work in which nothing is wrong."""
LONGEST_PAUSE_S = 600.0
"""Longest pause in seconds between two tries: one that the chain refuses costs gas."""

Arrives = Callable[[Policy], Awaitable[None]]
"""Returns once a policy is loaded, or its verified files are on the disk."""
Recheck = Callable[[ClaimedWork, bytes], Awaitable[FailedCheck | None]]
"""Checks work that passed check 1 and its file on this machine, by checks 2 to 7."""


class Defence:
    """Disputes the verdicts of fraud on one node's work."""

    def __init__(self, context: WorkerContext, arrives: Arrives, recheck: Recheck) -> None:
        self._context = context
        self._arrives = arrives
        self._recheck = recheck
        self.outage = Outage("a claim for work that was called fraud", longest_s=LONGEST_PAUSE_S)
        self.waits_until: dict[Hash32, float] = {}
        """Monotonic time of the next try about each accusation whose last one failed."""
        self._found: dict[Hash32, tuple[Judged, Ruling]] = {}
        """What this machine found about accused work that is not claimed yet."""
        self._said: set[Hash32] = set()
        self._arriving: dict[Policy, asyncio.Task[None]] = {}
        """Fetches of accused work's policies, which later tries join: one that begins anew hashes
        all files again, and on a slow disk would never end in time."""

    async def close(self) -> None:
        """Stop fetching policies."""
        await self._stop_fetching(self._arriving)

    async def _stop_fetching(self, policies: Iterable[Policy]) -> None:
        fetches = [self._arriving.pop(policy) for policy in list(policies)]
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    async def serve(self) -> None:
        """Dispute all accusations; a failure only delays the one that it concerns."""
        silence = self._context.held.silence
        if silence is None:
            return
        accused = silence.accused
        self.waits_until = {k: at for k, at in self.waits_until.items() if k in accused}
        needed = {_policy_of(judged) for judged in accused.values()}
        await self._stop_fetching(self._arriving.keys() - needed)
        for case_id, judged in list(accused.items()):
            if time.monotonic() < self.waits_until.get(case_id, 0.0):
                continue
            try:
                await self._contest(silence, judged)
                await self._close(silence, judged)
            except (*SURVIVED, ConfigError, TimeoutError) as error:
                self._say_how_by_hand(judged, error)
                self.waits_until[case_id] = time.monotonic() + self.outage.failed(error)
                continue
            self.waits_until.pop(case_id, None)
            if not self.waits_until:
                self.outage.recovered()

    async def _contest(self, silence: SilenceDuty, accused: Judged) -> None:
        """Claim what this machine finds, unless it is fraud, or nobody can claim any more."""
        if await self._is_over(silence, accused):
            self._report("a verdict of fraud can be disputed no more", accused)
            return
        about, ruling = self._found.get(accused.case_id, (None, None))
        if about is not accused:
            ruling = await self._judge(accused)
        if ruling is None:
            self._report("the file of work that was called fraud is lost", accused)
            return
        self._found[accused.case_id] = accused, ruling
        if ruling.verdict is Verdict.FRAUD:
            said = "this machine finds its own work at fault, too: nothing is claimed"
            self._report(said, accused)
            return
        async with asyncio.timeout(CLAIM_S):
            await self.claim(silence, accused, ruling)

    async def _is_over(self, silence: SilenceDuty, accused: Judged) -> bool:
        """Return whether no claim about a verdict is possible any more."""
        case = self._context.view.cases.get(accused.case_id)
        if case is not None:
            return case.closed
        return await self._context.now() >= silence.closes_at(accused.batch)

    async def _judge(self, accused: Judged) -> Ruling | None:
        """Return the ruling of the validators' own checks on this machine; None if the file is
        lost.
        """
        context, signed, batch = self._context, accused.signed, accused.batch
        data = await asyncio.to_thread(context.journal.data, signed)
        if data is None:
            return None
        entry = entry_of(context.work(signed), batch.committed_at)
        work = claim_of(context.view, batch, entry, accused.position, context.domain)
        finding = check_claim(work)
        if finding is None:
            await self._arrived(_policy_of(accused))
            finding = await self._recheck(work, data)
        return Ruling(finding.verdict, finding.reason) if finding else HONEST

    async def _arrived(self, policy: Policy) -> None:
        """Wait until a policy is at hand. After CONTEST_S it raises TimeoutError, and the fetch
        goes on: the engine computes outside of this bound, because a thread cannot be stopped.
        """
        if policy not in self._arriving:
            self._arriving[policy] = asyncio.ensure_future(self._arrives(policy))
        fetch = self._arriving[policy]
        async with asyncio.timeout(CONTEST_S):
            await asyncio.wait([fetch])
        del self._arriving[policy]
        fetch.result()

    async def claim(self, silence: SilenceDuty, judged: Judged, ruling: Ruling) -> None:
        """Demand a ruling in the place of a verdict of fraud from the network's jurors;
        `SilenceDuty.fill_rooms` shows them the file. Raises MusterError when that is not possible.
        """
        signed, batch = judged.signed, judged.batch
        context, proof = self._context, batch.prove(judged.position)
        case = context.view.cases.get(judged.case_id)
        made = case.claims if case else ()
        # A stranger's claim may name no room in which jurors find the file.
        accounts = silence.chain.account, context.worker
        own = (each for each in made if each.claimant in accounts)
        if not any(is_same(each.ruling, ruling.number) for each in own):
            silence.require_bench()
            await silence.provide_bond()
            siblings = self._siblings(judged, made)
            work = CommittedWork(signed.submission, context.sign(signed.submission), siblings)
            await claim(silence.chain, proof, work, ruling, silence.sources, key=context.key)
            fields = {**signed.fields, "ruling": str(ruling)}
            logger.warning("claimed before jurors that the work is no fraud", extra=fields)
        silence.deposits.forget(signed)
        silence.claimed[judged.case_id] = judged

    def _siblings(self, judged: Judged, made: Sequence[ClaimView]) -> tuple[Hash32, ...]:
        """Return the proof that a batch holds judged work, from the journal or a claim in the case;
        empty where nobody has shown it, so that the record names the work.
        """
        signed, batch = judged.signed, judged.batch
        proven = self._context.journal.proven(signed)
        if proven and proven.name == batch.name:
            return proven.proof
        # Once a claim has a proof, the contract refuses claims without one.
        about = (each for each in made if each.submission == signed.submission)
        shown = (each.proof for each in about if batch.is_proven(each, judged.position))
        return next(shown, ())

    async def _close(self, silence: SilenceDuty, judged: Judged) -> None:
        """Note that a verdict of fraud was disputed or cannot be."""
        if silence.accused.get(judged.case_id) is not judged:
            return  # after a reorganisation it is accused in another batch
        if judged.case_id not in silence.claimed:  # rooms are offered its file first
            await asyncio.to_thread(self._context.journal.answer, judged.signed, judged.case_id)
        silence.accepted.pop(judged.signed.slot, None)
        self._found.pop(judged.case_id, None)
        del silence.accused[judged.case_id]

    def _say_how_by_hand(self, judged: Judged, error: Exception) -> None:
        """Log once about an accusation that a claim is refused, not only delayed by an outage."""
        if judged.case_id in self._said or not isinstance(error, ContractRevert | ConfigError):
            return
        self._said.add(judged.case_id)
        hint = f"claim by hand: muster dispute open {_place(judged)} --keystore FILE"
        fields = {"submission": _place(judged), "error": str(error), "hint": hint}
        logger.error("work was called fraud wrongly and could not be claimed yet", extra=fields)

    def _report(self, what: str, judged: Judged) -> None:
        logger.error(what, extra={"submission": _place(judged)})


def _policy_of(judged: Judged) -> Policy:
    ticket = judged.signed.ticket
    return ticket.policy_version, ticket.policy_root


def _place(judged: Judged) -> str:
    return f"{judged.batch.batch_id}:{judged.position}"
