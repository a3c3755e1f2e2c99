"""What shows that a message between sites comes from one of them: a mark by a key they all hold.

The key is derived from the trainer's own, which every site has anyway, so there is no second secret
to hand out. Marks are BLAKE3 keyed hashes over the place a message is for and the message; who
does not hold the key can neither make one nor use it in another place. They keep nobody from
reading: what sites exchange is published anyway.
"""

from __future__ import annotations

from hmac import compare_digest

from blake3 import blake3

from muster.protocol.ids import RunId

MARK_BYTES = 32
"""Bytes of a mark."""
CONTEXT = "muster trainer sites 1"
"""What the key is derived for; the number is that of the sites' protocol."""


class Seal:
    """Marks messages, and tells which marks are right."""

    def __init__(self, secret: bytes) -> None:
        """`secret` has 32 bytes; the same at all sites."""
        self._secret = secret

    def mark(self, place: str, data: bytes | memoryview) -> bytes:
        """Return the mark of a message at its place."""
        named = place.encode()
        head = len(named).to_bytes(4, "big") + named
        return blake3(head, key=self._secret).update(data).digest()

    def close(self, place: str, data: bytes) -> bytes:
        """Return a message with its mark behind it."""
        return data + self.mark(place, data)

    def open(self, place: str, data: bytes) -> bytes | None:
        """Return the message that `close` marked for this place; None for anything else."""
        message, mark = data[:-MARK_BYTES], data[-MARK_BYTES:]
        return message if compare_digest(self.mark(place, message), mark) else None


def site_secret(trainer_key: bytes, run_id: RunId, chain_id: int) -> bytes:
    """Return the key by which the sites of a run know one another."""
    of = trainer_key + int(run_id).to_bytes(32, "big") + chain_id.to_bytes(32, "big")
    return blake3(of, derive_key_context=CONTEXT).digest()
