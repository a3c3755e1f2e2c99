"""Everything that components must agree on byte for byte: ids, messages, hashes, seeds, signatures.

No I/O, no network, no torch. Everything here is specified in `docs/protocol.md` and checked by the
golden vectors in `tests/conformance/`, which Solidity runs too.
"""
