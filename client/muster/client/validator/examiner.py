"""One claim at a time on one engine: its file, its policy, the ordered checks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from muster.client.validator.checks import (
    ClaimedWork,
    FailedCheck,
    check_claim,
    check_file,
    unreadable,
)
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.judging import Judgement, Rules, bounds_of, say_list_fault, unread
from muster.client.validator.soundness import examine_surely, judge_generated, own_trouble
from muster.inference.engine import set_aside_in
from muster.lifecycle import ComputeThread
from muster.protocol.errors import ApiError, EncodingError
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.messages import Ticket
from muster.protocol.rollouts import Rollout
from muster.protocol.set_aside import NOTHING, SetAside

if TYPE_CHECKING:
    from muster.client.validator.place import ValidatorPlace

_LASTINGLY_MISSING = frozenset({404, 410})
"""Answers that say a file is not there."""


async def read_rows(
    claim: ClaimedWork, data: bytes, rules: Rules, decoder: FileDecoder, listed: SetAside
) -> list[Rollout] | Judgement:
    """Return the rows of a claim's file, or the judgement on one that has none; `listed` is what
    the policy that it claims sets aside.
    """
    bounds = await asyncio.to_thread(bounds_of, claim, rules, listed)
    try:
        return await decoder.decode(data, bounds)
    except EncodingError as error:
        return unread(claim, unreadable(str(error)))


class Examiner:
    """Judges claims for one validator, one at a time: its engine holds one policy."""

    def __init__(self, place: ValidatorPlace, failing_since: dict[object, float]) -> None:
        """`failing_since` says by what it is, since when of the clock a thing could not be had."""
        self.place = place
        self.version: PolicyVersion | None = None
        """The policy version that is loaded."""
        self._failing_since = failing_since
        self._root: Hash32 | None = None
        self._compute = ComputeThread()
        self._turn = asyncio.Lock()

    def close(self) -> None:
        """Stop computing."""
        self._compute.close()

    async def judge(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        """Return the judgement on a claim, and its file if it was read.

        Raises ValidatorDisturbed, and judges nothing, where this machine lacks what that takes.
        """
        with own_trouble():
            return await self._judge(claim)

    async def _judge(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        if finding := check_claim(claim):
            return unread(claim, finding), None
        place, submission = self.place, claim.submission
        data = await self.file(submission.file_hash)
        if finding := check_file(data):
            return unread(claim, finding), None
        assert data is not None  # check_file
        policy = claim.terms.policies[submission.policy_version]
        listed = await self._listed(submission.policy_version, policy.root)
        rows = await read_rows(claim, data, place.rules, place.decoder, listed)
        if isinstance(rows, Judgement):
            return rows, data
        async with self._turn:
            await self.load(submission.policy_version, policy.root)
            judged = await self._compute.run(
                examine_surely, claim, rows, place.rules, place.engine, place.fingerprinted
            )
            return judged, data

    async def judge_own(self, ticket: Ticket) -> FailedCheck | None:
        """Return what it would find in work that it generates itself, see `soundness`."""
        with own_trouble():
            async with self._turn:
                await self.load(ticket.policy_version, ticket.policy_root)
                rules, engine = self.place.rules, self.place.engine
                return await self._compute.run(judge_generated, ticket, rules, engine)

    async def file(self, name: Hash32) -> bytes | None:
        """Return a submission's file; None once the orchestrator has lacked it for long enough, and
        nobody else shows it.
        """
        try:
            data = await self._shown(name)
        except ApiError as error:
            since = self._failing_since.setdefault(name, self.place.clock())
            waited_s = self.place.clock() - since
            if error.status in _LASTINGLY_MISSING and waited_s >= self.place.file_patience_s:
                return None
            raise
        self._failing_since.pop(name, None)
        return data

    async def _shown(self, name: Hash32) -> bytes:
        try:
            return await self.place.api.file(name)
        except ApiError as refused:
            if self.place.elsewhere is None:
                raise
            try:
                return await self.place.elsewhere.file(name)
            except ApiError:
                raise refused from None

    async def _listed(self, version: PolicyVersion, root: Hash32) -> SetAside:
        """Return what a policy version sets aside, which need not be loaded."""
        if not self.place.rules.recipe.skips_problems:
            return NOTHING
        folder = await self.place.fetcher.fetch(self.place.run_id, version, root)
        return await asyncio.to_thread(set_aside_in, folder)

    async def load(self, version: PolicyVersion, root: Hash32) -> None:
        """Load a policy version, verified against the root on chain."""
        if (self.version, self._root) == (version, root):
            return
        folder = await self.place.fetcher.fetch(self.place.run_id, version, root)
        # A load that fails leaves the engine without any policy.
        self.version = self._root = None
        await self._compute.run(self.place.engine.load_policy, folder, version)
        say_list_fault(self.place.rules, self.place.engine)
        self.version, self._root = version, root
