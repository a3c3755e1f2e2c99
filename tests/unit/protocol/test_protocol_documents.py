"""Canonical JSON and the recipe: one document, one byte string, one hash."""

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
import rfc8785
from hypothesis import given, strategies as st
from pydantic import Field

from muster.protocol.documents import Document, DocumentPart, Since
from muster.protocol.encoding import canonical_json, parse_canonical_json
from muster.protocol.errors import EncodingError
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.toploc.calibration import Calibration

RECIPE = Recipe(
    name="demo",
    sampling=SamplingRecipe(
        problems_per_submission=8, samples_per_problem=16, temperature=0.6, max_new_tokens=6
    ),
    training=TrainingRecipe(submissions_per_step=4, learning_rate=5e-4),
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values)
def test_canonical_json_survives_a_round_trip(value: Any) -> None:
    data = canonical_json(value)
    assert canonical_json(parse_canonical_json(data, max_bytes=1 << 16)) == data


@given(json_values)
def test_canonical_json_is_what_the_reference_writes(value: Any) -> None:
    assert canonical_json(value) == rfc8785.dumps(value)


@pytest.mark.parametrize(
    "value",
    [
        {"\U0001f600": 1, "\ufb33": 2},
        {'\x00\x1f\x7f\u2028\b\f\n\r\t"\\/': '\x00\x1f\x7f\u2028\b\f\n\r\t"\\/'},
        {"a": 1e21, "b": [1.0, -0.0, True, 2**53 - 1, None, (1, 2)]},
        "\U0001f600",
    ],
)
def test_canonical_json_of_what_encoders_differ_in_is_the_reference_s(value: Any) -> None:
    assert canonical_json(value) == rfc8785.dumps(value)


@pytest.mark.parametrize("value", [{1: 2}, 2**53, float("nan"), "\ud800", {"\ud800": 1}, {1, 2}])
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(EncodingError):
        canonical_json(value)


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 9), min_size=2, max_size=5))
def test_key_order_does_not_matter(value: dict[str, int]) -> None:
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))


@pytest.mark.parametrize(
    "data", [b'{"a": 1}', b'{"b":1,"a":2}', b"1.0", b"", b"{", b"\xff", b"NaN", b'{"\\ud800":1}']
)
def test_parse_refuses_what_is_not_canonical(data: bytes) -> None:
    with pytest.raises(EncodingError):
        parse_canonical_json(data, max_bytes=100)


def test_parse_refuses_oversized_documents_unread() -> None:
    with pytest.raises(EncodingError, match="exceeds the limit of 10"):
        parse_canonical_json(b'"' + b"x" * 50 + b'"', max_bytes=10)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**60, {1: 2}, object()])
def test_canonical_json_refuses_what_json_cannot_hold(value: Any) -> None:
    with pytest.raises(EncodingError, match="cannot be canonical"):
        canonical_json(value)


def test_recipe_survives_a_round_trip() -> None:
    assert Recipe.from_bytes(RECIPE.to_bytes()) == RECIPE


def test_recipe_hash_changes_with_any_parameter() -> None:
    other = RECIPE.model_copy(update={"training": TrainingRecipe(submissions_per_step=5)})
    assert other.hash() != RECIPE.hash()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("sampling", "temperature"), 0),
        (("sampling", "temperature"), "1"),
        (("sampling", "samples_per_problem"), 1),
        (("training", "clip_delta"), 1.1),
        (("training", "max_async_level"), -1),
        (("schema_version",), 5),
        (("name",), ""),
        (("surprise",), 1),
    ],
)
def test_recipe_refuses_bad_values(path: tuple[str, ...], value: object) -> None:
    document = json.loads(RECIPE.to_bytes())
    part = document
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(EncodingError, match="recipe"):
        Recipe.from_bytes(canonical_json(document))


def test_recipe_refuses_documents_that_rely_on_defaults() -> None:
    document = json.loads(RECIPE.to_bytes())
    del document["training"]["clip_epsilon"]
    with pytest.raises(EncodingError, match="re-encode"):
        Recipe.from_bytes(canonical_json(document))


# ------------------------------------------------------------------------- schema versions

KEPT = Path(__file__).with_name("documents")
"""Folder with one pinned document of each schema version; the file's name is its hash."""
KINDS: dict[str, type[Document]] = {"recipe": Recipe, "calibration": Calibration}


@pytest.mark.parametrize("path", sorted(KEPT.iterdir()), ids=lambda path: path.name)
def test_document_that_was_pinned_in_any_version_is_read(path: Path) -> None:
    kind, version, digest, _ = path.name.split(".")
    document = KINDS[kind].from_bytes(path.read_bytes())
    assert (str(document.schema_version), document.hash().hex()) == (version, digest)


def test_every_version_of_a_document_is_kept() -> None:
    kept = {tuple(path.name.split(".")[:2]) for path in KEPT.iterdir()}
    recipes, calibrations = ("1", "2", "3", "4"), ("3", "4", "5", "6")
    assert kept == {("recipe", v) for v in recipes} | {("calibration", v) for v in calibrations}
    for kind, document in KINDS.items():
        newest = str(document.model_fields["schema_version"].default)
        assert (kind, newest) in kept


class _Part(DocumentPart):
    first: int
    second: Annotated[int, Field(ge=0), Since(2)] = 0


class _Grown(Document):
    """A document whose second version has two more fields."""

    NAME = "test"
    MAX_BYTES = 1000

    schema_version: Annotated[int, Field(ge=1, le=2)] = 2
    parts: tuple[_Part, ...]
    later: Annotated[str, Since(2)] = ""


OLD = b'{"parts":[{"first":1}],"schema_version":1}'
NEW = b'{"later":"","parts":[{"first":1,"second":0}],"schema_version":2}'


@pytest.mark.parametrize("data", [OLD, NEW])
def test_document_is_written_in_its_own_version(data: bytes) -> None:
    document = _Grown.from_bytes(data)
    assert document.to_bytes() == data
    assert (document.later, document.parts) == ("", (_Part(first=1),))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (NEW.replace(b":2}", b":1}"), "re-encode"),
        (OLD.replace(b":1}]", b':1,"second":3}]'), "second came with schema version 2, this is 1"),
        (OLD.replace(b":1}", b":2}", 2), "re-encode"),
        (NEW.replace(b":2}", b":3}"), "less than or equal to 2"),
    ],
)
def test_document_that_is_not_of_its_version_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(EncodingError, match=reason):
        _Grown.from_bytes(data)
