"""Hypothesis strategies for values of any ABI type."""

from typing import Any

from eth_abi.grammar import parse
from hypothesis import strategies as st

from muster.protocol.ids import to_address

ELEMENTARY: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "address": st.binary(min_size=20, max_size=20).map(to_address),
    "bytes": st.binary(max_size=100),
    "bytes32": st.binary(min_size=32, max_size=32),
    "bytes4": st.binary(min_size=4, max_size=4),
    "string": st.text(max_size=40),
    **{
        f"uint{bits}": st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 40, 64, 88, 128, 256)
    },
}


def values_of(kind: str) -> st.SearchStrategy[Any]:
    if kind.endswith("[]"):
        return st.lists(values_of(kind[:-2]), max_size=3).map(tuple)
    if kind.startswith("("):
        return st.tuples(*(values_of(part.to_type_str()) for part in parse(kind).components))
    return ELEMENTARY[kind]
