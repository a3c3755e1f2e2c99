"""One task instance: a row in the GENESYS schema, as strict canonical JSON.

Owns the form of a row. The verifier of a `task_type` gives it its meaning.
"""

from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from muster.protocol.documents import first_fault
from muster.protocol.encoding import canonical_json, keccak, parse_canonical_json
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32

MAX_PROBLEM_BYTES = 1024 * 1024
"""Most bytes of a row; a longer one is not read."""
MIN_PROBLEM_BYTES = 146
"""Least bytes of a row."""
_CANONICAL = object()
"""Validation context of values whose size is checked elsewhere."""


class Problem(BaseModel):
    """A problem; the fields of GENESYS's Task, with the same names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    problem_id: Annotated[str, Field(min_length=1, max_length=128)]
    """Unique in its task set."""
    source: Annotated[str, Field(max_length=256)] = ""
    """Where the problem comes from."""
    task_type: Annotated[str, Field(min_length=1, max_length=64)]
    """Names the verifier that grades answers."""
    in_source_id: str | None = None
    """Its id in the source."""
    prompt: Annotated[str, Field(min_length=1)]
    """The text of the problem for the model."""
    gold_standard_solution: str | None = None
    """An answer that the verifier scores 1, if one is known."""
    verification_info: dict[str, Any] = {}
    """Data that the verifier needs in addition to the answer."""
    metadata: dict[str, Any] = {}
    """Anything else; nothing in Muster reads it."""

    @model_validator(mode="after")
    def _is_encodable(self, info: ValidationInfo) -> Self:
        if info.context is not _CANONICAL and len(self.to_bytes()) > MAX_PROBLEM_BYTES:
            raise ValueError(f"the problem exceeds {MAX_PROBLEM_BYTES} bytes")
        return self

    def to_bytes(self) -> bytes:
        """Return the canonical JSON, without a line break."""
        # All fields without copies: `model_dump` would copy the dictionaries.
        return canonical_json(self.__dict__)

    def content_hash(self) -> Hash32:
        """Return the Keccak-256 of the canonical JSON."""
        return keccak(self.to_bytes())

    @classmethod
    def encode(cls, fields: dict[str, Any]) -> bytes:
        """Return the canonical JSON of a problem with these fields.

        Raises EncodingError when they make no problem.
        """
        try:
            problem = cls.model_validate(fields, context=_CANONICAL)
        except ValidationError as error:
            raise EncodingError(first_fault(error)) from error
        data = problem.to_bytes()
        if len(data) > MAX_PROBLEM_BYTES:
            raise EncodingError(f"the problem exceeds {MAX_PROBLEM_BYTES} bytes")
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse canonical JSON; raises EncodingError on anything that `to_bytes` does not write."""
        value = parse_canonical_json(data, max_bytes=MAX_PROBLEM_BYTES)
        try:
            problem = cls.model_validate(value, context=_CANONICAL)
        except ValidationError as error:
            raise EncodingError(f"malformed problem: {first_fault(error)}") from error
        if len(value) != len(cls.model_fields):
            raise EncodingError(f"problem {problem.problem_id!r} lacks a field")
        return problem
