"""Turns what a reverted call returns into a named error with arguments and advice."""

from __future__ import annotations

from functools import cache
from typing import Any

from muster.chain.abi import CONTRACTS, FACTORY, AbiError, contract_abi
from muster.chain.codec import compile_decoder
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ContractRevert, EncodingError

_TEXT = AbiError("Error", compile_decoder(("string",)))
_PANIC = AbiError("Panic", compile_decoder(("uint256",)))

HINTS = {
    "ERC20InsufficientBalance": "the account holds too few tokens; a development chain has a "
    "faucet: muster stake --faucet",
    "ERC20InsufficientAllowance": "approve the contract for the amount first",
    "RegistryStakeTooLow": "add stake in that run: muster stake --run ID --amount TOKENS",
    "RegistryStillJailed": "wait until the jail time is over",
    "RegistryNodeTaken": "use a fresh node key: muster wallet new FILE",
    "RegistryWrongStatus": "muster worker status says what it is in that run; who validates for a "
    "run does not work for it",
    "RegistryInvalidNodeSignature": "name the worker's node key: --node KEYSTORE",
    "RunInvalidValidator": "is it invited (muster run invite), not seated yet, and no worker of "
    "the run?",
    "RunStakeTooLow": "add stake in that run: muster stake --run ID --amount TOKENS",
    "RunTermsChanged": "read the terms again: muster run show; who joins while a change is "
    "announced waits for it",
    "PoolStakeTooLow": "add stake: muster juror join --amount TOKENS",
    "PoolPlaceHeld": "wait until no open case can draw the place that you left",
    "CourtNotAnnounced": "a claim is announced first, and made within 256 blocks: the same command "
    "does both",
    "CourtNoJurors": "nobody is on the network's bench: muster juror status counts them",
    "CourtMayNotClaim": "an account that may be drawn as a juror of the case claims nothing in it",
    "CourtWindowClosed": "its challenge window is over, and the outcome stands",
    "LedgerInvalidTicket": "only work with a ticket of the run's orchestrator counts, at most 60 s "
    "after its deadline",
    "LedgerWrongTime": "the message says from when and until when it is possible",
    "VaultInsufficientStake": "muster worker status shows what is staked in each run",
    "LedgerUnauthorized": "only the run's orchestrator may do this: is it the right keystore?",
    "LedgerPaused": "the run's owner paused submissions",
    "LedgerNotFinal": "wait until the challenge window is over",
    "FactoryTaken": "it is there already: the same command goes on with what is missing",
    "FactoryUnauthorized": "only the account that began a deployment goes on with it",
    "EscrowNotFinal": "wait until the challenge window is over",
    "EscrowUnderfunded": "ask the run's owner to fund the run",
    "RunUnauthorized": "is it the right keystore?",
    "VaultNotWithdrawable": "wait until the unbonding period is over",
}
"""What the user can do about errors that users meet."""


@cache
def error_table() -> dict[bytes, AbiError]:
    """Return every error of every contract by selector, with Solidity's own two."""
    table = {
        keccak(b"Error(string)")[:4]: _TEXT,
        keccak(b"Panic(uint256)")[:4]: _PANIC,
    }
    for contract in (*CONTRACTS, FACTORY):
        table |= contract_abi(contract).errors
    return table


def decode_revert(data: bytes, *, tx: str | None = None) -> ContractRevert:
    """Return the error that a revert's bytes stand for.

    An unknown selector is shown as such; no bytes at all is what `assert`-less failures leave.
    """
    if len(data) < 4:
        return ContractRevert("without a reason", tx=tx, hint="it may have run out of gas")
    known = error_table().get(data[:4])
    if known is None:
        return ContractRevert(
            hex0x(data[:4]),
            (hex0x(data[4:]),) if data[4:] else (),
            tx=tx,
            hint=f"none of the {len(error_table())} errors of Muster's contracts: are they the "
            "version in --deployments?",
        )
    try:
        args = tuple(_shown(value) for value in known.decode(data[4:]))
    except EncodingError:
        args = (hex0x(data[4:]),)
    return ContractRevert(known.name, args, tx=tx, hint=HINTS.get(known.name))


def _shown(value: Any) -> object:
    return hex0x(value) if isinstance(value, bytes) else value
