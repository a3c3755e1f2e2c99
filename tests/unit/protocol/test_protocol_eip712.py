"""Signatures: one encoding each, valid in one domain only."""

import pytest
from eth_account import Account
from eth_account.messages import encode_typed_data
from eth_keys.datatypes import PrivateKey
from hypothesis import given, strategies as st

from muster.protocol.eip712 import Domain, address_of, digest, recover, sign
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import SignatureError
from muster.protocol.ids import Hash32, PolicyVersion, RunId, Step, to_address
from muster.protocol.messages import ApiRequest, HardwareReport, Submission

KEY = bytes(31) + b"\x07"
DOMAIN = Domain(31337, to_address("0x" + "11" * 20))
ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
keys = st.integers(1, ORDER - 1).map(lambda n: n.to_bytes(32, "big"))
hashes = st.binary(min_size=32, max_size=32).map(Hash32)


@given(keys, hashes)
def test_recover_returns_the_signer(key: bytes, message: Hash32) -> None:
    assert recover(message, sign(message, key)) == address_of(key)


@given(hashes, hashes)
def test_recover_names_another_signer_when_the_message_differs(a: Hash32, b: Hash32) -> None:
    if a != b:
        assert recover(b, sign(a, KEY)) != address_of(KEY)


@given(keys, hashes)
def test_signature_is_the_one_that_rfc_6979_makes(key: bytes, message: Hash32) -> None:
    assert sign(message, key)[:64] == PrivateKey(key).sign_msg_hash(message).to_bytes()[:64]
    assert address_of(key) == PrivateKey(key).public_key.to_checksum_address()


@pytest.mark.parametrize(
    "key", [b"", bytes(31) + b"\0", b"\x07", bytes(32) + b"\x07", b"\xff" * 32]
)
def test_key_is_refused_when_it_is_not_one(key: bytes) -> None:
    with pytest.raises(SignatureError, match="not 32 valid bytes"):
        sign(keccak(b"x"), key)
    with pytest.raises(SignatureError, match="not 32 valid bytes"):
        address_of(key)


@pytest.mark.parametrize("r", [0, ORDER, 2**256 - 1])
def test_recover_refuses_r_out_of_range(r: int) -> None:
    signature = r.to_bytes(32, "big") + sign(keccak(b"x"), KEY)[32:]
    with pytest.raises(SignatureError, match="no key"):
        recover(keccak(b"x"), signature)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_digest_is_refused_when_it_has_another_length(length: int) -> None:
    with pytest.raises(SignatureError, match="digest has 32 bytes"):
        sign(Hash32(bytes(length)), KEY)
    with pytest.raises(SignatureError, match="digest has 32 bytes"):
        recover(Hash32(bytes(length)), sign(keccak(b"x"), KEY))


@given(st.binary(max_size=80))
def test_recover_is_total_over_bytes(signature: bytes) -> None:
    try:
        recover(keccak(b"x"), signature)
    except SignatureError:
        return
    assert len(signature) == 65


def test_recover_refuses_high_s() -> None:
    message = keccak(b"x")
    good = sign(message, KEY)
    s = ORDER - int.from_bytes(good[32:64], "big")
    flipped = good[:32] + s.to_bytes(32, "big") + bytes([55 - good[64]])
    with pytest.raises(SignatureError, match="upper half"):
        recover(message, flipped)


@pytest.mark.parametrize("v", [0, 1, 26, 29, 255])
def test_recover_refuses_other_v(v: int) -> None:
    message = keccak(b"x")
    with pytest.raises(SignatureError, match="27 or 28"):
        recover(message, sign(message, KEY)[:64] + bytes([v]))


def test_sign_names_no_key_when_the_key_is_invalid() -> None:
    bad = b"\xff" * 32
    with pytest.raises(SignatureError) as caught:
        sign(keccak(b"x"), bad)
    assert "ff" * 8 not in str(caught.value)


def test_digest_equals_eth_account_for_a_submission() -> None:
    submission = Submission(
        run_id=RunId(3),
        worker=to_address("0x" + "22" * 20),
        step=Step(4),
        index=5,
        policy_version=PolicyVersion(2),
        file_hash=keccak(b"file"),
        rollouts=128,
        units=640,
    )
    fields = ["runId", "worker", "step", "index", "policyVersion", "fileHash", "rollouts", "units"]
    values = [3, submission.worker, 4, 5, 2, submission.file_hash, 128, 640]
    assert digest(DOMAIN, submission.struct_hash()) == _eth_account_digest(
        "Submission", Submission.TYPE, dict(zip(fields, values, strict=True))
    )


def test_digest_equals_eth_account_for_a_hardware_report() -> None:
    node = to_address("0x" + "22" * 20)
    said = HardwareReport(RunId(3), node, 8, 64_000, 2, 80_000, 99)
    fields = ["runId", "node", "cpuCores", "memoryMb", "gpus", "gpuMemoryMb", "issuedAt"]
    values = [3, node, 8, 64_000, 2, 80_000, 99]
    assert digest(DOMAIN, said.struct_hash()) == _eth_account_digest(
        "HardwareReport", HardwareReport.TYPE, dict(zip(fields, values, strict=True))
    )


def test_digest_equals_eth_account_for_text_fields() -> None:
    request = ApiRequest("0xabc", "POST", "/v1/leases?x=1", keccak(b"b"), keccak(b"n"), 99)
    fields = ["audience", "method", "path", "bodyHash", "nonce", "issuedAt"]
    values = ["0xabc", "POST", "/v1/leases?x=1", keccak(b"b"), keccak(b"n"), 99]
    assert digest(DOMAIN, request.struct_hash()) == _eth_account_digest(
        "ApiRequest", ApiRequest.TYPE, dict(zip(fields, values, strict=True))
    )


def _eth_account_digest(name: str, type_string: str, message: dict[str, object]) -> bytes:
    members = [m.split(" ") for m in type_string[len(name) + 1 : -1].split(",")]
    signable = encode_typed_data(
        {
            "name": "Muster",
            "version": "1",
            "chainId": DOMAIN.chain_id,
            "verifyingContract": DOMAIN.verifying_contract,
        },
        {name: [{"type": t, "name": n} for t, n in members]},
        message,
    )
    signed = Account.sign_message(signable, hex0x(KEY))
    return bytes(signed.message_hash)
