"""Examiner: judges one claim at a time for a validator: its file, its policy, the checks in order.

A claim whose file or policy cannot be had now is not judged: ApiError or PolicyUnavailable is
raised, and the validator tries again. Only a file that every source has lacked for
`file_patience_s` counts as missing, which the check of the file rejects (`check_file`).
"""

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
    from muster.client.validator.context import ValidatorContext

_LASTINGLY_MISSING = frozenset({404, 410})
"""HTTP statuses that mean a file does not exist."""


async def read_rows(
    claim: ClaimedWork, data: bytes, rules: Rules, decoder: FileDecoder, listed: SetAside
) -> list[Rollout] | Judgement:
    """Return the rows of a claim's file, or the judgement if the file is malformed; `listed` is the
    list of the claimed policy.
    """
    bounds = await asyncio.to_thread(bounds_of, claim, rules, listed)
    try:
        return await decoder.decode(data, bounds)
    except EncodingError as error:
        return unread(claim, unreadable(str(error)))


class Examiner:
    """Judges claims for one validator, one at a time: its engine holds one policy."""

    def __init__(self, context: ValidatorContext, failing_since: dict[object, float]) -> None:
        """`failing_since` maps each unavailable thing to the clock time of its first failure."""
        self.context = context
        self.version: PolicyVersion | None = None
        """The policy version that is loaded."""
        self._failing_since = failing_since
        self._root: Hash32 | None = None
        self._compute = ComputeThread()
        self._turn = asyncio.Lock()

    def close(self) -> None:
        """Stop computing."""
        self._compute.close()

    async def judge(
        self, claim: ClaimedWork, *, proofs_first: bool = False
    ) -> tuple[Judgement, bytes | None]:
        """Return the judgement on a claim, and its file if it was read; `proofs_first` as for
        `examine`.

        Raises ValidatorDisturbed, and judges nothing, when this machine lacks resources.
        """
        with own_trouble():
            return await self._judge(claim, proofs_first)

    async def _judge(
        self, claim: ClaimedWork, proofs_first: bool
    ) -> tuple[Judgement, bytes | None]:
        if finding := check_claim(claim):
            return unread(claim, finding), None
        context, submission = self.context, claim.submission
        data = await self.file(submission.file_hash)
        if finding := check_file(data):
            return unread(claim, finding), None
        assert data is not None  # check_file
        policy = claim.terms.policies[submission.policy_version]
        listed = await self._listed(submission.policy_version, policy.root)
        rows = await read_rows(claim, data, context.rules, context.decoder, listed)
        if isinstance(rows, Judgement):
            return rows, data
        async with self._turn:
            await self.load(submission.policy_version, policy.root)
            judged = await self._compute.run(
                examine_surely,
                claim,
                rows,
                context.rules,
                context.engine,
                context.fingerprinted,
                proofs_first=proofs_first,
            )
            return judged, data

    async def judge_own(self, ticket: Ticket) -> FailedCheck | None:
        """Return the failed check of an item that it generates itself, or None; see the module's
        docstring."""
        with own_trouble():
            async with self._turn:
                await self.load(ticket.policy_version, ticket.policy_root)
                rules, engine = self.context.rules, self.context.engine
                return await self._compute.run(judge_generated, ticket, rules, engine)

    async def file(self, name: Hash32) -> bytes | None:
        """Return a submission's file; None once the orchestrator has lacked it for long enough, and
        no other source has it.
        """
        try:
            data = await self.context.from_any_source(
                self.context.api.file(name), lambda other: other.file(name)
            )
        except ApiError as error:
            since = self._failing_since.setdefault(name, self.context.clock())
            waited_s = self.context.clock() - since
            if error.status in _LASTINGLY_MISSING and waited_s >= self.context.file_patience_s:
                return None
            raise
        self._failing_since.pop(name, None)
        return data

    async def _listed(self, version: PolicyVersion, root: Hash32) -> SetAside:
        """Return the list of a policy version, which need not be loaded."""
        if not self.context.rules.recipe.skips_problems:
            return NOTHING
        folder = await self.context.fetcher.fetch(self.context.run_id, version, root)
        return await asyncio.to_thread(set_aside_in, folder)

    async def load(self, version: PolicyVersion, root: Hash32) -> None:
        """Load a policy version, verified against the root on chain, unless the engine has it."""
        engine = self.context.engine
        is_loaded = (self.version, self._root) == (version, root)
        # An engine in its own process loses its policy when the process dies.
        if is_loaded and engine.policy_version == version:
            return
        folder = await self.context.fetcher.fetch(self.context.run_id, version, root)
        # A failed load leaves the engine without a policy.
        self.version = self._root = None
        await self._compute.run(engine.load_policy, folder, version)
        say_list_fault(self.context.rules, engine)
        self.version, self._root = version, root
