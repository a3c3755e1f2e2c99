"""The accounts of a devnet, derived from a seed so that a demo repeats. Never for real money."""

from dataclasses import dataclass
from enum import StrEnum

from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address

PASSWORD = "devnet"
"""Password of all devnet keystores, which protect nothing of value."""
CHEATS = (
    "other-model",
    "stale-policy",
    "constant-proof",
    "forged-reward",
    "own-problem",
    "best-of-many",
    "greedy-decoder",
)
"""Kinds of cheaters; `muster.app.demo.adversary` has the program of each."""


class Role(StrEnum):
    """Role of a worker in the demo."""

    HONEST = "honest"
    """Plays by the rules."""
    CHEATER = "cheater"
    """Deviates in one named way."""
    RESTARTED = "restarted"
    """Plays by the rules, is killed in mid-run and comes back."""


@dataclass(frozen=True, slots=True)
class DemoAccount:
    """One account's name and key."""

    name: str
    """Name in logs and file names."""
    key: bytes
    """Private key."""

    @property
    def address(self) -> Address:
        """Account address."""
        return address_of(self.key)

    def __repr__(self) -> str:
        return f"Account({self.name!r}, {self.address})"


@dataclass(frozen=True, slots=True)
class DemoWorker:
    """A worker of the demo: its wallet, its node key, its role."""

    wallet: DemoAccount
    """The cold staking wallet."""
    node: DemoAccount
    """The hot key its worker process signs with."""
    role: Role
    """Its role."""
    cheat: str | None = None
    """The kind of cheating, for a cheater."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.wallet.name


@dataclass(frozen=True, slots=True)
class Cast:
    """All accounts that take part."""

    owner: DemoAccount
    """Creates and funds the run; deploys the contracts."""
    trainer: DemoAccount
    """Publishes policies."""
    orchestrator: DemoAccount
    """Signs tickets, commits batches."""
    validators: tuple[DemoAccount, ...]
    """Sign outcomes."""
    jurors: tuple[DemoAccount, ...]
    """Judge disputes, of any run."""
    members: tuple[DemoWorker, ...]
    """Workers."""

    @property
    def accounts(self) -> list[DemoAccount]:
        """All accounts that send transactions."""
        wallets = [member.wallet for member in self.members]
        run = [self.owner, self.trainer, self.orchestrator]
        return [*run, *self.validators, *self.jurors, *wallets]


def account(seed: int, name: str) -> DemoAccount:
    """Return the account of a name under a seed."""
    return DemoAccount(name, keccak(f"muster devnet {seed} {name}".encode()))


def cast(
    seed: int, *, honest: int, cheats: tuple[str, ...], validators: int = 3, jurors: int = 1
) -> Cast:
    """Return the cast: `honest` honest workers, one restarted worker, one cheater per kind."""
    roles: list[tuple[str, Role, str | None]]
    roles = [(f"honest-{i + 1}", Role.HONEST, None) for i in range(honest)]
    roles += [("restarted", Role.RESTARTED, None)]
    roles += [(f"cheater-{i + 1}", Role.CHEATER, kind) for i, kind in enumerate(cheats)]
    return Cast(
        owner=account(seed, "owner"),
        trainer=account(seed, "trainer"),
        orchestrator=account(seed, "orchestrator"),
        validators=tuple(account(seed, f"validator-{i + 1}") for i in range(validators)),
        jurors=tuple(account(seed, f"juror-{i + 1}") for i in range(jurors)),
        members=tuple(
            DemoWorker(account(seed, name), account(seed, f"{name} node"), role, kind)
            for name, role, kind in roles
        ),
    )
