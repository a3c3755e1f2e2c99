"""MusterToken and StakeVault: who holds what, and what backs it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from muster.devnet.simulator.model.words import (
    HELD,
    NOBODY,
    PPM,
    RELEASED,
    RESTORED,
    Escrow,
    Fixed,
    Name,
    Refused,
    Stake,
    need,
)


class Stakes:
    """MusterToken and StakeVault."""

    def __init__(self, fixed: Fixed, now: int, block: int) -> None:
        self.fixed = fixed
        self.now, self.block = now, block
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.balances: dict[str, int] = defaultdict(int)
        self.allowances: dict[tuple[str, str], int] = defaultdict(int)
        self.burned = 0
        self.stakes: dict[str, Stake] = defaultdict(Stake)
        self.escrows: dict[Name, Escrow] = {}

    @contextmanager
    def transaction(self, now: int, block: int) -> Iterator[list[tuple[str, dict[str, Any]]]]:
        """One transaction in a block: all of it happens, or none. Yields its events."""
        self.now, self.block, self.events = now, block, []
        before = copy.deepcopy(self.__dict__)
        try:
            yield self.events
        except Refused:
            self.__dict__.update(before)
            raise

    def emit(self, event: str, **args: Any) -> None:
        self.events.append((event, args))

    # --------------------------------------------------------------------- token

    def _move(self, source: str, to: str, amount: int) -> None:
        need(to != NOBODY, "ERC20InvalidReceiver", NOBODY)
        held = self.balances[source]
        need(amount <= held, "ERC20InsufficientBalance", source, held, amount)
        self.balances[source] -= amount
        self.balances[to] += amount

    def _pull(self, spender: str, source: str, amount: int) -> None:
        allowed = self.allowances[source, spender]
        need(amount <= allowed, "ERC20InsufficientAllowance", spender, allowed, amount)
        if allowed < 2**256 - 1:
            self.allowances[source, spender] -= amount
        self._move(source, spender, amount)

    def _burn(self, source: str, amount: int) -> None:
        assert self.balances[source] >= amount
        self.balances[source] -= amount
        self.burned += amount

    # --------------------------------------------------------------------- stake

    def deposit(self, caller: str, owner: str, amount: int) -> None:
        need(amount > 0, "VaultZeroAmount")
        account = self.stakes[owner]
        account.active += amount
        self.emit("Deposited", owner=owner, amount=amount, active=account.active)
        self._pull("StakeVault", caller, amount)

    def deposit_with_permit(self, caller: str, amount: int, *, signed: bool) -> None:
        if signed:
            self.allowances[caller, "StakeVault"] = amount
        self.deposit(caller, caller, amount)

    def request_unbond(self, caller: str, amount: int) -> None:
        need(amount > 0, "VaultZeroAmount")
        active = self.stakes[caller].active
        need(amount <= active, "VaultInsufficientStake", caller, amount, active)
        self._unbond(caller, amount)
        self._jail_for_low_stake(caller)

    def _unbond(self, owner: str, amount: int) -> None:
        account = self.stakes[owner]
        account.active -= amount
        account.unbonding += amount
        account.withdrawable_at = self.now + self.fixed.unbonding
        self.emit(
            "UnbondRequested",
            owner=owner,
            amount=amount,
            unbonding=account.unbonding,
            withdrawable_at=account.withdrawable_at,
        )

    def withdraw(self, caller: str) -> None:
        account = self.stakes[caller]
        amount, due = account.unbonding, account.withdrawable_at
        need(amount > 0 and self.now >= due, "VaultNotWithdrawable", caller, amount, due)
        held = account.open_cases > 0 or self.now < account.held_until
        outlasted = self.now >= due + self.fixed.unbonding
        need(
            outlasted or not held,
            "VaultStakeHeld",
            caller,
            account.open_cases,
            account.held_until,
        )
        account.unbonding = account.withdrawable_at = 0
        self.emit("Withdrawn", owner=caller, amount=amount)
        self._move("StakeVault", caller, amount)

    def _hold(self, owner: str, until: int) -> None:
        account = self.stakes[owner]
        if until > account.held_until:
            account.held_until = until
            self._emit_held(owner)

    def _count_case(self, owner: str, change: int) -> None:
        self.stakes[owner].open_cases += change
        self._emit_held(owner)

    def _emit_held(self, owner: str) -> None:
        account = self.stakes[owner]
        held = {"held_until": account.held_until, "open_cases": account.open_cases}
        self.emit("StakeHeld", owner=owner, **held)

    def _slash(self, owner: str, ppm: int, offence: Name, reporter: str) -> int:
        need(offence not in self.escrows, "VaultOffenceSettled", offence)
        account = self.stakes[owner]
        # Rounded up.
        active = -(-account.active * ppm // PPM)
        unbonding = -(-account.unbonding * ppm // PPM)
        account.active -= active
        account.unbonding -= unbonding
        self.escrows[offence] = Escrow(owner, reporter, active + unbonding)
        self.emit(
            "Slashed",
            owner=owner,
            offence=offence,
            from_active=active,
            from_unbonding=unbonding,
            reporter=reporter,
        )
        self._jail_for_low_stake(owner)
        return active + unbonding

    def _release(self, offence: Name) -> None:
        escrow = self.escrows.get(offence)
        need(escrow is not None and escrow.status == HELD, "VaultOffenceSettled", offence)
        assert escrow is not None
        escrow.status = RELEASED
        insured = escrow.amount * self.fixed.insurance_ppm // PPM
        rewarded = 0
        if escrow.reporter != NOBODY:
            share = escrow.amount * self.fixed.reporter_ppm // PPM
            rewarded = min(share, self.fixed.reporter_cap)
        burned = escrow.amount - insured - rewarded
        self.emit(
            "SlashReleased", offence=offence, burned=burned, insured=insured, rewarded=rewarded
        )
        self._burn("StakeVault", burned)
        self._move("StakeVault", "insurance", insured)
        if rewarded:
            self._move("StakeVault", escrow.reporter, rewarded)

    def _restore(self, offence: Name) -> None:
        escrow = self.escrows[offence]
        assert escrow.status == HELD
        escrow.status = RESTORED
        self.stakes[escrow.owner].active += escrow.amount
        self.emit("SlashRestored", owner=escrow.owner, offence=offence, amount=escrow.amount)

    def _jail_for_low_stake(self, name: str) -> None:
        """Take note in WorkerRegistry that an account's stake has shrunk."""
        raise NotImplementedError
