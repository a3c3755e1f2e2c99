"""The fee rules of chains, against the chains' own test vectors."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from muster.lab.economics.chain_fees import (
    ChainKind,
    Cost,
    Fees,
    Footprint,
    OpScalars,
    cost_of,
    fastlz_length,
    floor_gas,
    op_data_fee,
    operator_fee,
)

GWEI = 10**9
TAKEN = Footprint(
    gas=100_000, zero_bytes=100, nonzero_bytes=200, fastlz_bytes=235, brotli_bytes=210
)
SCALARS = OpScalars(base_fee_scalar=20, blob_fee_scalar=15)

# op-geth, core/types/rollup_cost_test.go, TestFlzCompressLen.
EMPTY_TRANSACTION = bytes.fromhex("dd80808094095e7baea6a6c7c4c2dfeb977efac326af552d878080808080")
CONTRACT_CALL = bytes.fromhex(
    "02f901550a758302df1483be21b88304743f94f8"
    "0e51afb613d764fa61751affd3313c190a86bb870151bd62fd12adb8"
    "e41ef24f3f0000000000000000000000000000000000000000000000"
    "00000000000000006e000000000000000000000000af88d065e77c8c"
    "c2239327c5edb3a432268e5831000000000000000000000000000000"
    "000000000000000000000000000003c1e50000000000000000000000"
    "00000000000000000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000a0000000"
    "00000000000000000000000000000000000000000000000000000000"
    "148c89ed219d02f1a5be012c689b4f5b731827bebe00000000000000"
    "0000000000c001a033fd89cb37c31b2cba46b6466e040c61fc9b2a36"
    "75a7f5f493ebd5ad77c497f8a07cdf65680e238392693019b4092f61"
    "0222e71b7cec06449cb922b93b6a12744e"
)


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (b"", 0),
        (bytes([1]) * 1000, 21),
        (bytes(1000), 21),
        (EMPTY_TRANSACTION, 31),
        (CONTRACT_CALL, 202),
        (bytes.fromhex("facade"), 4),
    ],
    ids=["nothing", "ones", "zeros", "empty transaction", "contract call", "short"],
)
def test_fastlz_lengths_are_op_geths(data: bytes, length: int) -> None:
    assert fastlz_length(data) == length


@given(st.binary(max_size=600), st.integers(0, 40))
def test_fastlz_never_counts_more_than_literals(data: bytes, repeats: int) -> None:
    long = data * (repeats + 1)
    assert fastlz_length(long) <= len(long) + -(-len(long) // 32)


def test_the_op_stacks_data_fee_is_the_oracles() -> None:
    # op-geth, TestFjordL1CostSolidityParity: what GasPriceOracle answers for the same.
    fees = Fees(0, base_fee=2 * 10**6, blob_fee=3 * 10**6)
    assert op_data_fee(235, fees, SCALARS) == 105_484
    assert op_data_fee(236, fees, SCALARS) > 105_484


def test_no_transaction_is_smaller_than_the_op_stacks_least() -> None:
    # op-geth's empty transaction: 100 bytes x (16 x 2 x 1e9 + 3 x 1e7) / 1e6.
    fees = Fees(0, base_fee=GWEI, blob_fee=10**7)
    scalars = OpScalars(base_fee_scalar=2, blob_fee_scalar=3)
    assert op_data_fee(31, fees, scalars) == op_data_fee(170, fees, scalars) == 3_203_000
    # 836,500 x 171 - 42,585,600 is the first above a hundred million.
    assert op_data_fee(171, fees, scalars) > 3_203_000


def test_an_operators_fee_is_added_where_there_is_one() -> None:
    scalars = replace(SCALARS, operator_fee_scalar=3, operator_fee_constant=7)
    assert operator_fee(100_000, scalars) == 30_000_007
    with_fee = cost_of(ChainKind.BASE, TAKEN, Fees(5), scalars)
    assert with_fee == Cost(500_000 + 30_000_007, 0)


def test_nitro_charges_sixteen_units_per_compressed_byte() -> None:
    fees = Fees(10**7, base_fee=GWEI, blob_fee=GWEI, data_price=10**6)
    assert cost_of(ChainKind.ARBITRUM, TAKEN, fees, SCALARS) == Cost(10**12, 3_360_000_000)


def test_an_l1_charges_its_floor_for_calldata() -> None:
    # EIP-7623: 21,000 + 10 x (100 + 4 x 200).
    assert floor_gas(TAKEN) == 30_000
    assert cost_of(ChainKind.ETHEREUM, TAKEN, Fees(1), SCALARS) == Cost(100_000)
    light = replace(TAKEN, gas=25_000)
    assert cost_of(ChainKind.ETHEREUM, light, Fees(1), SCALARS) == Cost(30_000)
    assert cost_of(ChainKind.OWN, light, Fees(1), SCALARS) == Cost(25_000)


def test_ten_times_the_fees_are_ten_times_the_cost() -> None:
    fees = Fees(10**6, 10**9, 10**7, 10**5)
    scalars = OpScalars(base_fee_scalar=10**6, blob_fee_scalar=10**6)
    for kind in ChainKind:
        once = cost_of(kind, TAKEN, fees, scalars)
        assert cost_of(kind, TAKEN, fees.times(10), scalars).wei == pytest.approx(10 * once.wei)
    assert Cost(2, 3).times(4) == Cost(8, 12)
