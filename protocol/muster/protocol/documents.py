"""Documents that a run pins on chain: canonical JSON, one byte string and one hash each.

Whoever hands such a document over need not be trusted: its hash is on chain.
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from muster.protocol.encoding import canonical_json, keccak, parse_canonical_json
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32


class DocumentPart(BaseModel):
    """A part of a document: frozen, strict, nothing unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Document(DocumentPart):
    """A whole document; subclasses say what it is called and how large it may be."""

    NAME: ClassVar[str]
    """What errors call it."""
    MAX_BYTES: ClassVar[int]
    """Larger ones are refused unread."""

    def to_bytes(self) -> bytes:
        """Return the canonical JSON."""
        return canonical_json(self.model_dump(mode="json"))

    def hash(self) -> Hash32:
        """Return the Keccak-256 that is pinned on chain."""
        return keccak(self.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse canonical JSON; raises EncodingError on oversized, unknown or invalid content."""
        parse_canonical_json(data, max_bytes=cls.MAX_BYTES)
        try:
            # JSON has no tuples and may write 1.0 as 1, so strictness is pydantic's JSON kind.
            document = cls.model_validate_json(data)
        except ValidationError as error:
            raise EncodingError(f"malformed {cls.NAME}: {error}") from error
        if document.to_bytes() != data:
            raise EncodingError(f"{cls.NAME} does not re-encode to the same bytes")
        return document
