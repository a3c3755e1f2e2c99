"""Documents that a run pins on chain: canonical JSON, one byte string and one hash each.

Anybody may serve such a document without being trusted: its hash is on chain.

A document never changes once it is pinned, but its schema grows. Every document states the schema
version that it was written in, and is read and written in that version: a later field is not in its
bytes and has its default. A new field is declared with the version that adds it,

    new: Annotated[float, Field(ge=0), Since(2)] = 0.0

its default must have the meaning of documents without it, and the whole document's
`schema_version` gets the new number as default and upper bound. A new name among a field's values
needs none: a program that does not know it refuses the document. `tests/unit/protocol/documents/`
keeps one document of each version.
"""

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
    """Marks a field that was added in a later schema version than the first."""

    version: int


@dataclass(frozen=True, slots=True)
class Lines:
    """Marks a text that may have several lines."""


_LINES = str.maketrans("", "", "\n\t")


class DocumentPart(BaseModel):
    """A part of a document: frozen and strict, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _refuse_control_characters(self) -> Self:
        for name, value in self:
            # Integers have their own bounds, some of 256 bits.
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
    """A whole document; subclasses state its name and its largest size."""

    NAME: ClassVar[str]
    """Its name in errors."""
    MAX_BYTES: ClassVar[int]
    """Most bytes; a larger document is not read."""

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
            # JSON has no tuples and may write 1.0 as 1, so this uses pydantic's strict mode for
            # JSON.
            document = cls.model_validate_json(data)
        except ValidationError as error:
            raise EncodingError(f"malformed {cls.NAME}: {error}") from error
        if document.to_bytes() != data:
            raise EncodingError(f"{cls.NAME} does not re-encode to the same bytes")
        return document


def first_fault(error: ValidationError, whole: str = "document") -> str:
    """Return the first fault, after the name of its field, or after `whole` without a field."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where or whole}: {fault['msg']}"


def _later_than(part: type[DocumentPart], version: int) -> dict[str, int]:
    """Return the fields of a part that a schema version does not have, with the version of each."""
    marks = [(n, m) for n, field in part.model_fields.items() for m in field.metadata]
    return {n: m.version for n, m in marks if isinstance(m, Since) and m.version > version}


def _set_later_than(part: DocumentPart, version: int) -> Iterator[tuple[str, int]]:
    """Yield the later fields in a part and its parts that differ from their default."""
    later = _later_than(type(part), version)
    for name, value in part:
        if name in later and value != type(part).model_fields[name].default:
            yield name, later[name]
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, DocumentPart):
                yield from _set_later_than(inner, version)
