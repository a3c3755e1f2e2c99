"""MusterToken and StakeVault: balances, stakes and slashes."""

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from muster.lab.simulator.model.words import (
    BENCH,
    HELD,
    MAX_LATER,
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
        self.stakes: dict[tuple[int, str], Stake] = defaultdict(Stake)
        """By run and owner."""
        self.escrows: dict[Name, Escrow] = {}
        """By ("escrow", run, owner, offence, tag)."""

    @contextmanager
    def transaction(self, now: int, block: int) -> Iterator[list[tuple[str, dict[str, Any]]]]:
        """Run an atomic transaction in a block: all of it happens, or none. Yields its events."""
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

    def deposit(self, caller: str, run: int, owner: str, amount: int) -> None:
        need(amount > 0, "VaultZeroAmount")
        account = self.stakes[run, owner]
        account.active += amount
        self.emit("Deposited", run_id=run, owner=owner, amount=amount, active=account.active)
        self._pull("StakeVault", caller, amount)

    def request_unbond(self, caller: str, run: int, amount: int) -> None:
        need(amount > 0, "VaultZeroAmount")
        self._unbond(run, caller, amount)
        self._stake_fell(run, caller)

    def _unbond(self, run: int, owner: str, amount: int) -> None:
        account = self.stakes[run, owner]
        active = account.active
        need(amount <= active, "VaultInsufficientStake", run, owner, amount, active)
        account.active -= amount
        account.unbonding += amount
        account.withdrawable_at = self.now + self.fixed.unbonding
        self.emit(
            "UnbondRequested",
            run_id=run,
            owner=owner,
            amount=amount,
            unbonding=account.unbonding,
            withdrawable_at=account.withdrawable_at,
        )

    def _unbond_all(self, run: int, owner: str) -> None:
        if self.stakes[run, owner].active:
            self._unbond(run, owner, self.stakes[run, owner].active)

    def withdraw(self, caller: str, run: int) -> None:
        account = self.stakes[run, caller]
        amount, due = account.unbonding, account.withdrawable_at
        ready = amount > 0 and self.now >= due
        need(ready, "VaultNotWithdrawable", run, caller, amount, due)
        account.unbonding = account.withdrawable_at = 0
        self.emit("Withdrawn", run_id=run, owner=caller, amount=amount)
        self._move("StakeVault", caller, amount)

    # --------------------------------------------------------------------- slash

    def _hold(self, name: Name, ppm: int, batch: int, position: int) -> int:
        """Take stake for a fraud outcome, into escrow until the outcome is final."""
        amount = self._take(name, ppm, batch, position)
        self.jail_for_low_stake(int(name[1]), str(name[2]))
        return amount

    def _slash(self, name: Name, ppm: int, reporter: str = NOBODY) -> int:
        """Take stake permanently for a proven offence."""
        amount = self._take(name, ppm, 0, 0)
        self.escrows[name].status = RELEASED
        self._split(name, amount, reporter)
        self._stake_fell(int(name[1]), str(name[2]))
        return amount

    def _take(self, name: Name, ppm: int, batch: int, position: int) -> int:
        need(name not in self.escrows, "VaultOffenceSettled", name)
        _, run, owner, *_ = tuple(name)
        account = self.stakes[run, owner]
        # Rounded up.
        active = -(-account.active * ppm // PPM)
        unbonding = -(-account.unbonding * ppm // PPM)
        account.active -= active
        account.unbonding -= unbonding
        account.escrows.append(name)
        self.escrows[name] = Escrow(active + unbonding, ppm, batch, position)
        self.emit(
            "Slashed",
            run_id=run,
            owner=owner,
            escrow_id=name,
            verdict=("verdict", *name[1:], batch, position),
            from_active=active,
            from_unbonding=unbonding,
        )
        return active + unbonding

    def _release(self, name: Name, batch: int, position: int, reporter: str) -> None:
        escrow = self.escrows.get(name)
        need(escrow is not None and escrow.status == HELD, "VaultOffenceSettled", name)
        assert escrow is not None
        own = (escrow.batch, escrow.position) == (batch, position)
        need(own, "VaultWrongLeaf", name, batch, position)
        escrow.status = RELEASED
        self._split(name, escrow.amount, reporter)

    def _restore(self, name: Name, batch: int, position: int) -> bool:
        """Return the stake that an outcome took; return whether it had taken any."""
        escrow = self.escrows.get(name)
        if escrow is None or escrow.status != HELD:
            return False
        if (escrow.batch, escrow.position) != (batch, position):
            return False
        escrow.status = RESTORED
        _, run, owner, *_ = tuple(name)
        account = self.stakes[run, owner]
        returned = self._pay_later(account, name, escrow.amount)
        account.active += returned
        self.emit(
            "SlashRestored",
            run_id=run,
            owner=owner,
            escrow_id=name,
            returned=returned,
            followed=escrow.amount - returned,
        )
        return True

    def _pay_later(self, account: Stake, name: Name, amount: int) -> int:
        """Apply later offences to returned stake, as if it had been there."""
        later = account.escrows[account.escrows.index(name) + 1 :]
        for follower in later[:MAX_LATER]:
            escrow = self.escrows[follower]
            if amount == 0 or escrow.status == RESTORED:
                continue
            share = -(-amount * escrow.ppm // PPM)
            amount -= share
            escrow.amount += share
            self.emit("SlashFollowed", escrow_id=follower, from_escrow_id=name, amount=share)
            if escrow.status == RELEASED:
                self._split(follower, share, NOBODY)
        return amount

    def _split(self, name: Name, amount: int, reporter: str) -> None:
        insured = amount * self.fixed.insurance_ppm // PPM
        rewarded = 0
        if reporter != NOBODY:
            rewarded = min(amount * self.fixed.reporter_ppm // PPM, self.fixed.reporter_cap)
        burned = amount - insured - rewarded
        self.emit(
            "SlashReleased",
            escrow_id=name,
            reporter=reporter,
            burned=burned,
            insured=insured,
            rewarded=rewarded,
        )
        self._burn("StakeVault", burned)
        if insured:
            self._move("StakeVault", "insurance", insured)
        if rewarded:
            self._move("StakeVault", reporter, rewarded)

    # --------------------------------------------------- notices of a reduced stake

    def _stake_fell(self, run: int, owner: str) -> None:
        if run == BENCH:
            self.retire_for_low_stake(owner)
        else:
            self.jail_for_low_stake(run, owner)
            self.unseat_for_low_stake(run, owner)

    def retire_for_low_stake(self, juror: str) -> None:
        raise NotImplementedError

    def jail_for_low_stake(self, run: int, worker: str) -> None:
        raise NotImplementedError

    def unseat_for_low_stake(self, run: int, validator: str) -> None:
        raise NotImplementedError
