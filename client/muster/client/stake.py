"""Onboarding: stake and register a worker with its node in one transaction, or add stake.

The worker's key signs an ERC-2612 permit, the node's key its consent (`NodeRegistration`); both
travel in `WorkerRegistry.registerWithPermit`.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.chain import Chain, Receipt, RunTerms
from muster.client.quantities import format_duration, format_slashes, format_tokens
from muster.protocol.eip712 import digest, sign, struct_hash
from muster.protocol.encoding import address_bytes, keccak
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import NodeRegistration
from muster.wallet import Wallet

CONSENT_S = 3600
"""How long permit and consent hold: long enough for a slow chain, short enough to lapse."""
FAUCET_CHAIN_ID = 31337
"""The only chain whose token has a faucet."""
GAS_MONEY = 100 * 10**18
"""What an account gets there."""

_PERMIT_TYPE = "Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"


@dataclass(frozen=True, slots=True)
class StakeOffer:
    """What a stake would do, for people to read before they agree."""

    amount_wei: int
    """What is taken from the wallet and locked."""
    balance_wei: int
    """What the wallet holds."""
    required_wei: int
    """Active stake a worker must hold."""
    unbonding_s: int
    """Seconds between asking for the stake back and having it."""
    is_registered: bool
    """Whether the account is a worker already; then the amount is only added."""
    run: tuple[RunId, RunTerms] | None = None
    """The run whose slashes are of interest, if one is, with its terms."""

    def require_funds(self) -> None:
        """Raise ConfigError when the wallet holds less than is to be locked."""
        if self.balance_wei < self.amount_wei:
            raise ConfigError(
                f"the wallet holds {format_tokens(self.balance_wei)} tokens, staking takes "
                f"{format_tokens(self.amount_wei)}",
                hint="on a development chain, --faucet gets them",
            )

    def describe(self) -> str:
        """Return what is locked, for how long, and what can be slashed."""
        return (
            f"locks   {format_tokens(self.amount_wei)} of {format_tokens(self.balance_wei)} tokens "
            f"(a worker must hold {format_tokens(self.required_wei)})\n"
            f"back    {format_duration(self.unbonding_s)} after muster unstake asks for it\n"
            "slashed for fraud only: wrong problems, seeds, rewards or units, or rollouts that "
            f"another policy or no policy generated; {self._slashes()}"
        )

    def _slashes(self) -> str:
        if self.run is None:
            return "each run states its share, up to all of it (see it with --run)"
        run_id, terms = self.run
        slashes = format_slashes(terms.fraud_ppm, terms.exact_fraud_ppm)
        return f"run {run_id} takes {slashes}"


async def stake_offer(
    chain: Chain,
    account: Address,
    amount_wei: int | None,
    *,
    registers: bool,
    run_id: RunId | None = None,
) -> StakeOffer:
    """Return what staking would do; without an amount, what a new worker is required to hold.

    Raises ConfigError for an account or a run that it cannot be done for.
    """
    required = await chain.workers.required_stake()
    worker = await chain.workers.worker_of(account)
    is_registered = worker.worker_id != 0
    if registers and is_registered:
        raise ConfigError(
            f"{account} is a worker already",
            hint="leave out --node to add stake to it",
        )
    return StakeOffer(
        amount_wei=required if amount_wei is None else amount_wei,
        balance_wei=await chain.token.balance_of(account),
        required_wei=required,
        unbonding_s=await chain.vault.unbonding_period(),
        is_registered=is_registered,
        run=None if run_id is None else (run_id, await _terms(chain, run_id)),
    )


async def what_next(chain: Chain, account: Address, run: int | None) -> str:
    """Return what an account has now and does next, for people who have just staked."""
    active_wei = await chain.vault.active_stake(account)
    worker = await chain.workers.worker_of(account)
    held = f"staked  {format_tokens(active_wei)} tokens are {account}'s active stake now"
    if worker.worker_id == 0:
        return (
            f"{held}\nnext    a run's owner seats this address, then: muster validator run\n"
            "        or work: muster stake --node NODE.json registers a worker's node"
        )
    blocks = worker.active_from - await chain.block_number()
    wait = f"active in {blocks} blocks" if blocks > 0 else "active now"
    number = "RUN" if run is None else run
    return (
        f"{held}; worker {worker.worker_id}, {wait}\n"
        f"next    muster worker run --run {number} --keystore NODE.json --orchestrator URL \\\n"
        f"          --worker {account} --state-dir ~/.muster/run-{number}\n"
        f"then    muster worker status --run {number} --worker {account}"
    )


async def _terms(chain: Chain, run_id: RunId) -> RunTerms:
    if run_id > (count := await chain.runs.run_count()):
        raise ConfigError(
            f"there is no run {run_id}, there are {count}", hint="see muster run list"
        )
    return await chain.runs.terms_of(run_id)


async def take_gas_money(chain: Chain, account: Address) -> None:
    """Have an account hold GAS_MONEY; raises ConfigError on any chain but a development chain."""
    _require_faucet(chain)
    await chain.rpc.call("anvil_setBalance", account, hex(GAS_MONEY))


async def take_from_faucet(chain: Chain, account: Address, amount_wei: int) -> None:
    """Mint test tokens to an account; raises ConfigError on any chain but a development chain."""
    _require_faucet(chain)
    await chain.token.faucet(account, amount_wei)


def _require_faucet(chain: Chain) -> None:
    if chain.chain_id != FAUCET_CHAIN_ID:
        raise ConfigError(
            f"chain {chain.chain_id} has no faucet",
            hint="only development chains do: get tokens and gas money elsewhere",
        )


async def register_worker(chain: Chain, worker: Wallet, node: Wallet, amount_wei: int) -> Receipt:
    """Stake and register in one transaction and return its receipt; `chain` sends as the worker."""
    deadline = await chain.now() + CONSENT_S
    v, r, s = await sign_permit(chain, worker, amount_wei, deadline)
    return await chain.workers.register_with_permit(
        amount_wei,
        node.address,
        deadline,
        await sign_consent(chain, worker.address, node, deadline),
        deadline,
        v,
        r,
        s,
    )


async def sign_consent(chain: Chain, worker: Address, node: Wallet, deadline: int) -> bytes:
    """Return the node's signature that it works for the worker, good until the deadline."""
    consent = NodeRegistration(
        worker=worker,
        node=node.address,
        nonce=await chain.workers.nonces(worker),
        deadline=deadline,
    )
    return sign(digest(chain.domain("WorkerRegistry"), consent.struct_hash()), node.key)


async def add_stake(chain: Chain, owner: Wallet, amount_wei: int) -> Receipt:
    """Add to the owner's active stake in one transaction and return its receipt."""
    deadline = await chain.now() + CONSENT_S
    v, r, s = await sign_permit(chain, owner, amount_wei, deadline)
    return await chain.vault.deposit_with_permit(amount_wei, deadline, v, r, s)


async def sign_permit(
    chain: Chain, owner: Wallet, amount_wei: int, deadline: int
) -> tuple[int, Hash32, Hash32]:
    """Return v, r, s of the owner's ERC-2612 permit for StakeVault."""
    permit = struct_hash(
        _PERMIT_TYPE,
        address_bytes(owner.address),
        address_bytes(chain.deployment.contracts["StakeVault"]),
        amount_wei,
        await chain.token.nonces(owner.address),
        deadline,
    )
    # The token has an EIP-712 domain of its own.
    separator = await chain.token.domain_separator()
    signature = sign(keccak(b"\x19\x01" + separator + permit), owner.key)
    return signature[64], Hash32(signature[:32]), Hash32(signature[32:64])
