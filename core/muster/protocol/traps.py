"""Hidden traps: a committed secret decides which slots of a trap worker hold a trap.

The whole plan is one secret and one hash. The hash is on chain before the first trap. Anybody who
later sees the secret can verify which files were traps and what the right verdict was, and that
neither was decided after the verdicts. See docs/guides/watching.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from muster.protocol.encoding import abi_words, address_bytes, hex0x, keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, Hash32, RunId, Step, to_address, to_hash32

MILLION = 1_000_000
PLANS = to_address(keccak(b"muster.traps")[:20])
"""The spender of an `approve` that carries a plan's hash: an address without a key."""
_PURPOSE = keccak(b"muster.traps.v1")


class TrapKind(StrEnum):
    """Kinds of bad samples in traps, each as a known adversary makes them."""

    OTHER_SEED = "other-seed"
    """Sampled under another seed than it claims, as by a worker that picks the best of many."""
    COLD = "cold"
    """Sampled at a tenth of the temperature, as by a worker that wants more reward."""
    OTHER_PROOF = "other-proof"
    """With the proof of another sample, as by a worker that computes none."""


KINDS = tuple(TrapKind)


@dataclass(frozen=True, slots=True)
class Trap:
    """One file whose right verdict is Rejected: a single sample fails, below any fraud."""

    kind: TrapKind
    """The kind that is tried first; if its sample does not fail, the next kind is tried."""
    row: int
    """The sample, modulo the number of rows."""

    def kinds(self) -> list[TrapKind]:
        """Return the kinds in the order in which they are tried."""
        first = KINDS.index(self.kind)
        return [KINDS[(first + i) % len(KINDS)] for i in range(len(KINDS))]


@dataclass(frozen=True, slots=True)
class TrapPlan:
    """Which slots of a worker are traps, for a range of steps."""

    run_id: RunId
    worker: Address
    """The staked worker that lays them."""
    first_step: Step
    last_step: Step
    rate_ppm: int
    """Traps per million slots."""
    secret: Hash32
    """Decides which slots are traps; must be kept until the plan is over."""

    def __repr__(self) -> str:
        return f"TrapPlan(run_id={self.run_id}, worker={self.worker})"

    def commitment(self) -> Hash32:
        """Return the hash that is put on chain before the first trap."""
        return keccak(
            abi_words(
                _PURPOSE,
                self.run_id,
                address_bytes(self.worker),
                self.first_step,
                self.last_step,
                self.rate_ppm,
                self.secret,
            )
        )

    def trap_at(self, step: int, index: int) -> Trap | None:
        """Return the trap of a slot; None if the worker is honest there."""
        if not self.first_step <= step <= self.last_step:
            return None
        if self._draw(step, index, 0) % MILLION >= self.rate_ppm:
            return None
        kind = KINDS[self._draw(step, index, 1) % len(KINDS)]
        return Trap(kind, self._draw(step, index, 2))

    def _draw(self, step: int, index: int, number: int) -> int:
        return int.from_bytes(keccak(abi_words(self.secret, step, index, number))[:8], "big")

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, including the secret."""
        return {
            "run": self.run_id,
            "worker": self.worker,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "rate_ppm": self.rate_ppm,
            "secret": hex0x(self.secret),
        }

    @classmethod
    def from_json(cls, value: Any) -> TrapPlan:
        """Return the plan in JSON values; raises EncodingError for anything else."""
        try:
            numbers = [value[name] for name in ("run", "first_step", "last_step", "rate_ppm")]
            worker, secret = to_address(value["worker"]), to_hash32(value["secret"])
        except (KeyError, TypeError, ValueError) as error:
            raise EncodingError(f"not a trap plan: {error}") from error
        run, first, last, rate = numbers
        if not all(type(n) is int and 0 <= n < 1 << 32 for n in numbers) or rate > MILLION:
            raise EncodingError(f"not a trap plan: {numbers} is out of range")
        return cls(RunId(run), worker, Step(first), Step(last), rate, secret)
