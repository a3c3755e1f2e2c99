"""The parts of L2s' fee oracles, at their fixed addresses, that tests need."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from muster.chain import Chain
from muster.client.preflight import NODE_INTERFACE, OP_ORACLE
from muster.protocol.encoding import hex0x, keccak

L1_FEE, OPERATOR_FEE = "getL1Fee(bytes)", "getOperatorFee(uint256)"
L1_COMPONENT = "gasEstimateL1Component(address,bool,bytes)"
COIN = 10**18


def code_answering(answers: Mapping[str, Sequence[int]]) -> bytes:
    """Return a contract that answers each function with fixed words, and reverts for any other."""
    jumps, bodies = b"", b""
    # One comparison takes 15 bytes; a revert of 3 follows the last.
    start = 15 * len(answers) + 3
    for signature, words in answers.items():
        # CALLDATALOAD(0) >> 224 == selector ? jump
        selector = keccak(signature.encode())[:4]
        target = (start + len(bodies)).to_bytes(2, "big")
        jumps += bytes.fromhex("5f3560e01c63") + selector + b"\x14\x61" + target + b"\x57"
        bodies += b"\x5b"  # JUMPDEST
        for place, word in enumerate(words):
            # MSTORE(32 * place, word)
            bodies += b"\x7f" + word.to_bytes(32, "big")
            bodies += b"\x61" + (32 * place).to_bytes(2, "big") + b"\x52"
        # RETURN(0, 32 * words)
        bodies += b"\x61" + (32 * len(words)).to_bytes(2, "big") + b"\x5f\xf3"
    return jumps + b"\x5f\x5f\xfd" + bodies


@asynccontextmanager
async def placed(chain: Chain, code: bytes, *addresses: str) -> AsyncIterator[None]:
    """Put code at addresses, and remove it afterwards."""
    for address in addresses:
        await chain.rpc.call("anvil_setCode", address, hex0x(code))
    yield
    for address in addresses:
        await chain.rpc.call("anvil_setCode", address, "0x")


OP_STACK = (OP_ORACLE, code_answering({L1_FEE: [COIN], OPERATOR_FEE: [COIN // 2]}))
"""A coin for data, half a coin for the operator."""
BEFORE_ISTHMUS = (OP_ORACLE, code_answering({L1_FEE: [COIN]}))
"""An OP stack chain that knows no operator's fee."""
ARBITRUM = (NODE_INTERFACE, code_answering({L1_COMPONENT: [COIN // 10**9, 1, 1]}))
"""A billion gas for data: at a gwei, a coin."""
OTHERS = (
    (OP_ORACLE, code_answering({L1_FEE: [COIN, COIN]})),
    (OP_ORACLE, code_answering({OPERATOR_FEE: [COIN]})),
    (NODE_INTERFACE, code_answering({L1_COMPONENT: [COIN]})),
)
"""Contracts at the oracles' addresses that are no oracles."""
