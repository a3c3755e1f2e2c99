"""The committed vectors are what `muster.protocol` and an independent library compute."""

import json
from typing import Any

import generate
import pytest
from eth_abi import encode
from eth_account import Account
from eth_account.messages import encode_typed_data
from eth_utils import keccak as foreign_keccak

from muster.protocol.eip712 import recover
from muster.protocol.ids import to_hash32
from muster.protocol.merkle import verify_merkle_proof
from muster.protocol.messages import unpack_records

EIP712 = json.loads((generate.VECTORS / "eip712.json").read_text())
BATCH = json.loads((generate.VECTORS / "batch.json").read_text())
JURY = json.loads((generate.VECTORS / "jury.json").read_text())
SCHEDULE = json.loads((generate.VECTORS / "schedule.json").read_text())
MERKLE = json.loads((generate.VECTORS / "merkle.json").read_text())
FOREIGN = {"trl_losses"}
"""Made by other programs: `generate_trl.py`."""


@pytest.mark.parametrize("name", generate.documents())
def test_vectors_are_unchanged_when_regenerated(name: str) -> None:
    committed = (generate.VECTORS / f"{name}.json").read_text()
    assert generate.render(generate.documents()[name]) == committed


def test_no_vector_file_is_left_behind() -> None:
    assert {p.stem for p in generate.VECTORS.iterdir()} == set(generate.documents()) | FOREIGN


def typed_data(vector: dict[str, Any]) -> dict[str, Any]:
    """The message as wallets receive it, parsed from its type string."""
    name, inside = vector["type"].removesuffix(")").split("(")
    types = [
        dict(zip(("type", "name"), field.split(" "), strict=True)) for field in inside.split(",")
    ]
    numbers = {t["name"] for t in types if t["type"].startswith("uint")}
    return {
        "types": {
            "EIP712Domain": [
                {"name": "name", "type": "string"},
                {"name": "version", "type": "string"},
                {"name": "chainId", "type": "uint256"},
                {"name": "verifyingContract", "type": "address"},
            ],
            name: types,
        },
        "primaryType": name,
        "domain": {
            "name": "Muster",
            "version": "1",
            "chainId": EIP712["chain_id"],
            "verifyingContract": EIP712["domains"][vector["contract"]]["address"],
        },
        "message": {
            key: int(value, 16) if key in numbers and isinstance(value, str) else value
            for key, value in vector["fields"].items()
        },
    }


@pytest.mark.parametrize("name", EIP712["messages"])
def test_message_is_signed_as_wallets_sign_it(name: str) -> None:
    vector = EIP712["messages"][name]
    message = encode_typed_data(full_message=typed_data(vector))
    assert "0x" + message.body.hex() == vector["struct_hash"]
    assert "0x" + message.header.hex() == EIP712["domains"][vector["contract"]]["separator"]
    signed = Account.sign_message(message, vector["private_key"])
    assert "0x" + bytes(signed.signature).hex() == vector["signature"]
    assert "0x" + bytes(signed.message_hash).hex() == vector["digest"]


@pytest.mark.parametrize("name", EIP712["messages"])
def test_signature_recovers_to_its_signer(name: str) -> None:
    vector = EIP712["messages"][name]
    signature = bytes.fromhex(vector["signature"][2:])
    assert recover(to_hash32(vector["digest"]), signature) == vector["signer"]


def test_records_parse_back() -> None:
    records = unpack_records(bytes.fromhex(BATCH["packed"][2:]))
    assert [r.to_bytes().hex() for r in records] == [v["record"][2:] for v in BATCH["records"]]
    assert [r.units for r in records] == [v["units"] for v in BATCH["records"]]


@pytest.mark.parametrize("tree", MERKLE["trees"], ids=lambda t: f"{len(t['leaves'])} leaves")
def test_every_proof_leads_to_the_root_and_to_no_other_leaf(tree: dict[str, Any]) -> None:
    leaves = [to_hash32(leaf) for leaf in tree["leaves"]]
    root = to_hash32(tree["root"])
    for position, nodes in enumerate(tree["proofs"]):
        proof = [to_hash32(node) for node in nodes]
        assert verify_merkle_proof(leaves[position], proof, root)
        others = [leaf for i, leaf in enumerate(leaves) if i != position]
        assert not any(verify_merkle_proof(leaf, proof, root) for leaf in others)


@pytest.mark.parametrize("tree", MERKLE["trees"], ids=lambda t: f"{len(t['leaves'])} leaves")
def test_multi_proof_gives_every_node_that_is_missing_once(tree: dict[str, Any]) -> None:
    for part in tree["multi_proofs"]:
        needed = {node for i in part["positions"] for node in tree["proofs"][i]}
        assert len(set(part["siblings"])) == len(part["siblings"])
        assert set(part["siblings"]) <= needed
    last = tree["multi_proofs"][-1]
    assert last["siblings"] == tree["proofs"][last["positions"][0]]


def foreign_hash(types: list[str], values: list[Any]) -> bytes:
    """Keccak of the ABI encoding, by libraries that are not ours."""
    return bytes(foreign_keccak(encode(types, values)))


@pytest.mark.parametrize("case", JURY["cases"], ids=lambda c: f"{c['places']} places")
def test_jury_is_what_other_libraries_draw(case: dict[str, Any]) -> None:
    seed = foreign_hash(
        ["bytes32", "bytes32"], [bytes.fromhex(case[k][2:]) for k in ("block_hash", "case_id")]
    )
    assert seed.hex() == case["seed"][2:]
    acts = list(zip(case["who"], case["when"], case["joins"], strict=True))
    bench = [who for who, _, joins in acts if joins]
    may_sit = {who for who, when, joins in acts if joins and when < case["opened_at"]}
    may_sit -= {who for who, when, joins in acts if not joins and when < case["opened_at"]}
    may_sit -= set(case["excluded"])
    tries = (foreign_hash(["bytes32", "uint256"], [seed, i]) for i in range(512 if bench else 0))
    named = [bench[int.from_bytes(each, "big") % len(bench)] for each in tries]
    drawn = dict.fromkeys(who for who in named if who in may_sit)
    assert list(drawn)[: case["size"]] == case["jurors"]


def test_cases_claims_and_votes_are_named_as_other_libraries_do() -> None:
    leaf, result, salt = (bytes.fromhex(JURY[k][2:]) for k in ("leaf", "result_hash", "salt"))
    for each in JURY["summons"]:
        named = foreign_hash(["string", "uint64"], ["muster.summons", each["batch_id"]])
        assert each["case_id"] == "0x" + named.hex()
    for each in JURY["claims"]:
        assert each["ruling"] == each["verdict"] * 256 + each["reason"]
        assert each["is_exact"] is (each["verdict"] == 4 and 30 <= each["reason"] < 60)
        types = ["address", "bytes32", "uint16", "bytes32"]
        hidden = foreign_hash(types, [JURY["account"], leaf, each["ruling"], salt])
        assert each["announcement"] == "0x" + hidden.hex()
    for each in JURY["votes"]:
        types = ["bytes32", "address", "uint16", "bytes32", "bytes32"]
        hidden = foreign_hash(types, [leaf, JURY["account"], each["ruling"], result, salt])
        assert each["commitment"] == "0x" + hidden.hex()


@pytest.mark.parametrize("case", SCHEDULE["cases"], ids=lambda c: f"{len(c['seated'])} seats")
def test_schedule_is_what_other_libraries_draw(case: dict[str, Any]) -> None:
    beacon, root = bytes.fromhex(case["beacon"][2:]), bytes.fromhex(case["root"][2:])

    def seed_of(batch_id: int) -> bytes:
        types = ["bytes32", "uint64", "uint64", "bytes32"]
        return foreign_hash(types, [beacon, case["run_id"], batch_id, root])

    seed = seed_of(case["batch_id"])
    assert seed.hex() == case["seed"][2:]
    drawn = {
        foreign_hash(["bytes32", "uint256", "address"], [seed, 1, validator]): validator
        for validator in case["seated"]
    }
    order = [drawn[name] for name in sorted(drawn)]
    assert order == case["order"]
    stay = [validator for validator in order if validator in case["seated_now"]]
    since = [validator for validator in case["seated_now"] if validator not in order]
    assert stay + since == case["order_now"]
    place = int.from_bytes(foreign_hash(["bytes32", "uint256"], [seed, 2])[:8], "big")
    assert [place % count for count in range(1, 17)] == case["history_places"]
    shares = (foreign_hash(["bytes32", "uint256"], [seed_of(i), 0])[:8] for i in range(256))
    below = [i for i, share in enumerate(shares) if int.from_bytes(share, "big") < 0.05 * 2**64]
    assert below == case["reaudited"]
