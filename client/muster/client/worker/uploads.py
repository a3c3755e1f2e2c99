"""The way of signed work to the orchestrator, step 6 of a worker's loop.

Work is sent until it is answered, or the chain shows that it need not be. What is refused is left
to the duty against silence.
"""

import asyncio
import logging

from muster.api import SlotTaken
from muster.client.worker.context import WorkerContext
from muster.client.worker.journal import SignedSubmission, slot_of
from muster.protocol.eip712 import address_of, signer_of
from muster.protocol.errors import ApiError, ConfigError
from muster.protocol.messages import Submission

logger = logging.getLogger(__name__)

_LASTING_REFUSALS = frozenset({400, 403, 404, 409, 410, 413, 422})
"""HTTP statuses of an upload for which a retry is useless."""
_PASSING = frozenset({"ticket_unknown", "worker_not_active"})
"""Temporary refusals: the orchestrator lost its database, or considers the worker inactive until it
has read the chain after a reorganisation. It will give out the slot again, and only the signed
submission may fill it, so that is kept.
"""
_SLOT_TAKEN = "slot_taken"
"""The outcome of work for a slot that has other work with a signature of this worker's node. Two
signed submissions for one slot are a fraud that anybody who has both can prove.
"""


class Uploads:
    """Brings the signed work of a node to the run's orchestrator."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._held = context.held
        self.count = 0
        """Uploads since the process's start."""

    async def resume(self) -> None:
        """Upload again submissions without an outcome: a crash may have prevented the upload."""
        for signed in self._context.unfinished.values():
            await self.again(signed)

    async def again(self, signed: SignedSubmission) -> None:
        """Upload the submission signed for the slot, if it has no outcome and its file exists; no
        other may ever be signed."""
        if signed.slot not in self._context.unfinished:
            logger.debug("signed slot has an outcome", extra=signed.fields)
            return
        data = await asyncio.to_thread(self._context.journal.data, signed)
        if data is None:
            logger.debug("signed slot has no file any more", extra=signed.fields)
            return
        await self.send(signed, data)

    async def send(self, signed: SignedSubmission, data: bytes) -> None:
        """Upload a submission until it is answered, or the chain shows that it need not be."""
        submission = signed.submission
        signature = self._context.sign(submission)
        while True:
            try:
                await self._context.api.submit(submission, signature, data)
            except ApiError as error:
                if self._has_signed_another(submission, error):
                    self._drop(signed)
                    return
                if not self._is_awaited(signed):
                    return
                if error.status in _LASTING_REFUSALS:
                    fields = {**signed.fields, "code": error.code, "error": str(error)}
                    logger.warning("submission refused", extra=fields)
                    if error.code not in _PASSING:
                        await self._give_up(signed, error.code)
                    return
                await asyncio.sleep(self._held.outages.failed(error))
                continue
            self._held.outages.recovered()
            self.count += 1
            logger.info(
                "submission uploaded",
                extra={**signed.fields, "units": submission.units},
            )
            return

    def _has_signed_another(self, submission: Submission, refusal: ApiError) -> bool:
        """Return whether a refusal shows other work for the slot with this node's signature; an
        orchestrator's word alone could end a worker's recourse."""
        if not isinstance(refusal, SlotTaken):
            return False
        held, domain = refusal.held, self._context.domain
        if held.submission == submission or slot_of(held.submission) != slot_of(submission):
            return False
        return signer_of(domain, held.submission, held.signature) == address_of(self._context.key)

    def _is_awaited(self, signed: SignedSubmission) -> bool:
        """Return whether the orchestrator still needs a submission, by what is known of it."""
        if signed.slot not in self._context.unfinished:
            return False
        return self._held.silence is None or not self._held.silence.is_held(signed)

    def _drop(self, signed: SignedSubmission) -> None:
        """Never show a submission again whose slot has another one, and sign nothing more: the
        journal lacks signatures of this node."""
        ticket = signed.ticket
        fault = ConfigError(
            f"this node signed two submissions for step {ticket.step}, index {ticket.index}: the "
            "orchestrator has the other one, and this one is dropped",
            hint="stop any other process that uses the node's key, or put the newest --state-dir "
            "back if this one is an old copy; then start again",
        )
        logger.error(
            "the journal lacks signatures of this node",
            extra={**signed.fields, "error": str(fault), "hint": fault.hint},
        )
        self._held.fault = fault
        # Not in a thread: the duty against silence must not submit it in between.
        self._context.journal.finish(signed, _SLOT_TAKEN)

    async def _give_up(self, signed: SignedSubmission, said: str) -> None:
        """Leave a submission that the orchestrator refused to `silence`, if there is one."""
        if self._held.silence is not None:
            self._held.silence.refused[signed.slot] = said
        else:
            await asyncio.to_thread(self._context.journal.finish, signed, said)
