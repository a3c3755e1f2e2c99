"""A version is believed when root, version, run and signer are the right ones, all of them."""

import pytest
from hypothesis import given, strategies as st

from muster.protocol.eip712 import Domain, address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import SignatureError
from muster.protocol.ids import Hash32, PolicyVersion, RunId, to_address
from muster.shardcast import trust

KEY = bytes(31) + b"\x01"
ROOT = keccak(b"manifest")
RUN, V3 = RunId(1), PolicyVersion(3)
SIGNED = trust.sign_root(KEY, RUN, V3, ROOT)
TRUSTED = trust.TrustedRoot(None, address_of(KEY), trust.STANDALONE_DOMAIN)


def test_signature_of_the_trainer_is_accepted() -> None:
    trust.check_signature(RUN, V3, ROOT, SIGNED, TRUSTED)


@pytest.mark.parametrize(
    ("run", "version", "root"),
    [(RunId(2), V3, ROOT), (RUN, PolicyVersion(4), ROOT), (RUN, V3, keccak(b"other"))],
)
def test_signature_on_something_else_is_refused(
    run: RunId, version: PolicyVersion, root: Hash32
) -> None:
    with pytest.raises(SignatureError):
        trust.check_signature(run, version, root, SIGNED, TRUSTED)


def test_signature_for_a_chain_is_refused_without_one() -> None:
    signed = trust.sign_root(KEY, RUN, V3, ROOT, domain=Domain(1, to_address(b"\x11" * 20)))
    with pytest.raises(SignatureError, match="not by the trainer"):
        trust.check_signature(RUN, V3, ROOT, signed, TRUSTED)


@given(st.binary(max_size=70))
def test_any_other_bytes_are_refused(signature: bytes) -> None:
    with pytest.raises(SignatureError):
        trust.check_signature(RUN, V3, ROOT, signature, TRUSTED)


async def test_signer_is_trusted_for_every_version() -> None:
    trusted = await trust.trust_signer(address_of(KEY))(RUN, V3)
    assert trusted == TRUSTED
