"""Documents that a run pins on chain: canonical JSON, one byte string and one hash each.

Nobody who hands such a document over need be trusted: its hash is on chain.

A document never changes once it is pinned, but its form grows. Every document says the schema
version it was written in, and is read and written in that version: a field that came later is not
in its bytes and has its default. A new field is declared with the version that brings it,

    new: Annotated[float, Field(ge=0), Since(2)] = 0.0

its default must mean what documents without it meant, and `schema_version` gets the new number as
default and upper bound. `tests/unit/protocol/documents/` keeps one document of each version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from muster.protocol.encoding import canonical_json, keccak, message_fault, parse_canonical_json
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32


@dataclass(frozen=True, slots=True)
class Since:
    """Marks a field that came with a later schema version than the first."""

    version: int


@dataclass(frozen=True, slots=True)
class Lines:
    """Marks a text that may have several lines."""


_LINES = str.maketrans("", "", "\n\t")


class DocumentPart(BaseModel):
    """A part of a document: frozen, strict, nothing unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _refuse_control_characters(self) -> Self:
        for name, value in self:
            # Integers have bounds of their own, some of 256 bits.
            if not isinstance(value, str):
                continue
            has_lines = any(isinstance(m, Lines) for m in type(self).model_fields[name].metadata)
            shown = value.translate(_LINES) if has_lines else value
            if fault := message_fault(shown):
                raise ValueError(f"{name} {fault}")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_later_fields(
        self, serialize: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        """Return the fields that the context's schema version has; without a context, all."""
        values: dict[str, Any] = serialize(self)
        later = _later_than(type(self), info.context) if info.context else {}
        return {name: value for name, value in values.items() if name not in later}


class Document(DocumentPart):
    """A whole document; subclasses say what it is called and how large it may be."""

    NAME: ClassVar[str]
    """What errors call it."""
    MAX_BYTES: ClassVar[int]
    """Larger ones are refused unread."""

    schema_version: int
    """Version of the form that this document is read and written in."""

    @model_validator(mode="after")
    def _refuse_later_fields(self) -> Self:
        for name, since in _set_later_than(self, self.schema_version):
            raise ValueError(
                f"{name} came with schema version {since}, this is {self.schema_version}"
            )
        return self

    def to_bytes(self) -> bytes:
        """Return the canonical JSON, in the document's own schema version."""
        return canonical_json(self.model_dump(mode="json", context=self.schema_version))

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


def first_fault(error: ValidationError, whole: str = "document") -> str:
    """Return what is wrong first, after the name of its field, or of the `whole` without one."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where or whole}: {fault['msg']}"


def _later_than(part: type[DocumentPart], version: int) -> dict[str, int]:
    """Return the fields of a part that a schema version does not have, with their own version."""
    marks = [(n, m) for n, field in part.model_fields.items() for m in field.metadata]
    return {n: m.version for n, m in marks if isinstance(m, Since) and m.version > version}


def _set_later_than(part: DocumentPart, version: int) -> Iterator[tuple[str, int]]:
    """Yield the later fields that do not have their default, below a part."""
    later = _later_than(type(part), version)
    for name, value in part:
        if name in later and value != type(part).model_fields[name].default:
            yield name, later[name]
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, DocumentPart):
                yield from _set_later_than(inner, version)
