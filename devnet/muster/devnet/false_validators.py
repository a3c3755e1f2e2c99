"""Dishonest validators: the real validator with one hook overridden, each for one way of failing.

They sign, hand over and vote like any other; only what they say about a submission is not what
checking it yields.
"""

from __future__ import annotations

from muster.client.validator.checks import Claim, Finding
from muster.client.validator.judging import Judgement, unread
from muster.client.validator.loop import ValidatorLoop
from muster.protocol.messages import Reason, Verdict


class FalseAccuser(ValidatorLoop):
    """Calls whatever it is shown an exact fraud, so that its worker is slashed and banned."""

    async def _judge_claim(self, claim: Claim) -> tuple[Judgement, bytes | None]:
        detail = "row 0 claims a reward that the verifier does not give"
        return unread(claim, Finding(Verdict.FRAUD, Reason.WRONG_REWARD, detail)), None


KINDS: dict[str, type[ValidatorLoop]] = {"accuser": FalseAccuser}
"""Ways of failing by name."""
