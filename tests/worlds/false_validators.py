"""Dishonest validators: the real validator with one hook overridden, each for one way of failing.

They sign, hand over, commit and show like any other validator; but their verdicts, and their
proofs of checking, do not come from a check.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from muster.chain import BatchView
from muster.client.validator.checking_proofs import CheckingStore
from muster.client.validator.checks import ClaimedWork, FailedCheck
from muster.client.validator.judging import Judgement, unread
from muster.client.validator.loop import ValidatorLoop
from muster.protocol.checking import split_blocks
from muster.protocol.eip712 import address_of
from muster.protocol.errors import EngineError
from muster.protocol.ids import Address
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Verdict, unpack_records
from muster.protocol.rollouts import Bounds
from muster.toploc.projections import FINGERPRINT_BYTES


class FalseAccuser(ValidatorLoop):
    """Calls every submission an exact fraud, so that its worker is slashed and banned."""

    async def judge_claim(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        """Return an exact fraud."""
        detail = "row 0 claims a reward that the verifier does not give"
        return unread(claim, FailedCheck(Verdict.FRAUD, Reason.WRONG_REWARD, detail)), None


class Lazy(ValidatorLoop):
    """Accepts every submission, and shows made-up fingerprints of the right size.

    It reads the file, so that units and sizes are right, but does not run the model.
    """

    async def judge_claim(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        """Accept a file that could be read."""
        data = await self.examiner.file(claim.submission.file_hash)
        if data is None:
            return unread(claim, FailedCheck(Verdict.REJECTED, Reason.FILE_UNAVAILABLE, "")), None
        rows = await self.context.decoder.decode(data, Bounds.of(self.context.rules.recipe))
        blocks = len(split_blocks([len(row.completion_tokens) for row in rows]))
        return self._accepted(claim, blocks), data

    def _accepted(self, claim: ClaimedWork, blocks: int) -> Judgement:
        made_up = self._make_up(claim, blocks * FINGERPRINT_BYTES)
        me = address_of(self.context.key)
        return Judgement(None, claim.submission.units, fingerprints={me: made_up})

    def _make_up(self, _claim: ClaimedWork, size: int) -> bytes:
        return bytes(size)


class CoinFlip(Lazy):
    """Tosses a coin for every file to accept or reject it, without running the model."""

    async def judge_claim(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        """Accept or reject by the coin."""
        judgement, data = await super().judge_claim(claim)
        if hashlib.sha256(self.context.key + claim.submission.file_hash).digest()[0] % 2:
            finding = FailedCheck(Verdict.REJECTED, Reason.TOPLOC_MISMATCH, "so fell the coin")
            return replace(judgement, finding=finding), data
        return judgement, data


class TenthChecker(Lazy):
    """Checks one file in ten, and accepts the others."""

    async def judge_claim(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        """Check one file in ten."""
        if hashlib.sha256(self.context.key + claim.submission.file_hash).digest()[0] < 26:
            return await ValidatorLoop.judge_claim(self, claim)
        return await super().judge_claim(claim)


class Copier(ValidatorLoop):
    """Copies another validator's outcomes, and shows the other's fingerprints as its own.

    It reads both from the other's state folder at once: a copier that only listens to the network
    knows less.
    """

    folder: ClassVar[Path]
    """The other's state folder."""
    other: ClassVar[Address]
    """The other's account."""

    async def judge(self, batch: BatchView) -> list[OutcomeRecord]:
        """Return the other's outcomes; raises EngineError until it has judged the batch."""
        checked = CheckingStore(self.folder / "checking").find(batch.name)
        if checked is None:
            raise EngineError(f"the other has not judged batch {batch.batch_id} yet")
        me = address_of(self.context.key)
        self.fingerprints[batch.name] = [{me: each.get(self.other, b"")} for each in checked.found]
        entries = await self.reader.contents(batch)
        return [
            self._outcome(entry.submission, (batch.batch_id, position))
            for position, entry in enumerate(entries)
        ]

    def _outcome(self, submission: Submission, place: tuple[int, int]) -> OutcomeRecord:
        name = f"{submission.file_hash.hex()}/{place[0]}-{place[1]}.json"
        document = json.loads((self.folder / "evidence" / name).read_bytes())
        return unpack_records(bytes.fromhex(document["outcome"]["record"][2:]))[0]


KINDS: dict[str, type[ValidatorLoop]] = {
    "accuser": FalseAccuser,
    "lazy": Lazy,
    "coin-flip": CoinFlip,
    "tenth-checker": TenthChecker,
}
"""Ways of failing by name."""
