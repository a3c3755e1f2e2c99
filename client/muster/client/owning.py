"""Actions on a run by its owner or others: checked, described, and turned into transactions.

Every function returns an Act, or raises ConfigError with the reason why it is not possible (NotYet
if it will be later). Nothing is sent here: `muster.client.cli.run` shows an act, asks for
confirmation, and carries it out.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from muster.chain import Chain, ChainView, PauseCause, Receipt, RewardClaim, RunTerms, RunView
from muster.client.preflight import require_ordered_slashes
from muster.client.quantities import format_duration, format_slashes, format_time, format_tokens
from muster.client.rewards import PARALLEL_CALLS, STEP_BYTES as STEP_BYTES, size_of_claims
from muster.protocol.errors import ConfigError, ContractRevert, NotYet
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import Verdict

FUND_GAS = 150_000
"""Upper bound of the gas for paying in: the node cannot estimate it before the approval is
mined."""
RECOVERED_AT_ONCE = 50
"""Most outcomes recovered in one transaction."""
_UNRECOVERABLE = ("EscrowNotFinal", "EscrowAccepted", "EscrowDisputed", "EscrowRecovered")


@dataclass(frozen=True, slots=True)
class OwnerStep:
    """One transaction of an act."""

    call: str
    """Contract and function."""
    send: Callable[[Chain], Awaitable[Receipt]]
    """Sends the transaction, or only simulates it if the chain object does so."""
    gas: int | None = None
    """Upper bound of its gas if it cannot be simulated; None if it can."""
    size_bytes: int = STEP_BYTES
    """Upper bound of its signed bytes."""


@dataclass(frozen=True, slots=True)
class Act:
    """An action on a run."""

    facts: dict[str, Any]
    """Its effects as text: names and lines."""
    steps: tuple[OwnerStep, ...]
    """Its transactions, in order."""
    delay_s: int = 0
    """Seconds until it takes effect; 0 for at once."""
    values: dict[str, Any] = field(default_factory=dict)
    """Its effects for programs; amounts in wei are text."""


def _one_step(
    facts: dict[str, Any],
    call: str,
    send: Callable[[Chain], Awaitable[Receipt]],
    delay_s: int = 0,
    **values: Any,
) -> Act:
    return Act(facts, (OwnerStep(call, send),), delay_s, values)


@dataclass(frozen=True, slots=True)
class Subject:
    """The run and the account of an action."""

    chain: Chain
    """The connection; it need not be able to send."""
    view: ChainView
    """View of the chain."""
    run: RunView
    account: Address
    """The acting account."""
    now: int
    """The chain's time."""

    def require_owner(self) -> None:
        """Raise ConfigError unless the account owns the run and the run is open."""
        run = self.run
        if self.account != run.owner:
            raise ConfigError(
                f"run {run.run_id} belongs to {run.owner}, not to {self.account}",
                hint="give the owner's keystore with --keystore",
            )
        self.require_open()

    def require_open(self) -> None:
        """Raise ConfigError when the run was closed."""
        if self.run.closed_at:
            raise ConfigError(
                f"run {self.run.run_id} was closed on {format_time(self.run.closed_at)}, for good",
                hint="take back what is left of its funds: muster run reclaim",
            )


# Money


async def read_purse(chain: Chain, account: Address, amount_wei: int) -> int:
    """Return the token wei that an account holds; raises ConfigError when it cannot pay that much
    into a run."""
    held = await chain.token.balance_of(account)
    if held < amount_wei:
        raise ConfigError(
            f"{account} holds {format_tokens(held)} tokens, {format_tokens(amount_wei)} are to be "
            "paid in",
            hint="pay in less, or send it some tokens",
        )
    return held


async def fund(subject: Subject, amount_wei: int) -> Act:
    """Return the act of paying tokens into a run; anyone may."""
    subject.require_open()
    chain, run, account = subject.chain, subject.run, subject.account
    held = await read_purse(chain, account, amount_wei)
    escrow = chain.deployment.contracts["RewardEscrow"]
    pay = OwnerStep("RewardEscrow.fund", lambda chain: chain.escrow.fund(run.run_id, amount_wei))
    steps: tuple[OwnerStep, ...] = (pay,)
    if await chain.token.allowance(account, escrow) < amount_wei:
        steps = (
            OwnerStep("MusterToken.approve", lambda chain: chain.token.approve(escrow, amount_wei)),
            replace(pay, gas=FUND_GAS),
        )
    after, price = run.available_wei + amount_wei, run.config.terms.price_per_unit
    units = f", for {after // price:,} units" if price else ""
    return Act(
        {
            "pays in": f"{format_tokens(amount_wei)} of {format_tokens(held)} tokens",
            "then left": f"{format_tokens(after)} tokens{units}",
            "back": f"what is not earned, to {run.owner}, once the run is closed",
        },
        steps,
        values={"amount_wei": str(amount_wei)},
    )


async def reclaim(subject: Subject) -> Act:
    """Return the act of paying the rest of a closed run to its owner; anyone may."""
    run, period_s = subject.run, await subject.chain.escrow.claim_period()
    if not run.closed_at:
        raise ConfigError(
            f"run {run.run_id} is open: its funds are its workers'",
            hint="close it first, for good: muster run close",
        )
    due_at = run.closed_at + period_s
    is_due = subject.now >= due_at
    amount = run.available_wei + (run.reserved_wei if is_due else 0)
    if not amount and run.reserved_wei:
        raise NotYet(
            f"{format_tokens(run.reserved_wei)} tokens are set aside for workers, who may claim "
            f"until {format_time(due_at)}",
            hint="the same command takes back then what nobody claimed",
        )
    if not amount:
        raise ConfigError(f"nothing is left of run {run.run_id}", hint="see muster run show")
    later = None
    if run.reserved_wei and not is_due:
        later = f"{format_tokens(run.reserved_wei)} at most, from {format_time(due_at)}"
    return _one_step(
        {"pays": f"{format_tokens(amount)} tokens to its owner {run.owner}", "later": later},
        "RewardEscrow.reclaim",
        lambda chain: chain.escrow.reclaim(run.run_id),
        amount_wei=str(amount),
    )


async def recover(subject: Subject) -> Act:
    """Return the act of releasing tokens reserved for outcomes that are final and not accepted;
    anyone may.
    """
    candidates = [
        batch.claim([position])
        for batch in subject.view.batches.values()
        if batch.run_id == subject.run.run_id
        for position, record in enumerate(batch.records or ())
        if record.verdict is not Verdict.ACCEPTED
        or record.leaf(batch.batch_id, position) in subject.view.cases
    ]
    asking = asyncio.Semaphore(PARALLEL_CALLS)

    async def recoverable_wei(claim: RewardClaim) -> int | None:
        async with asking:
            return await _recoverable_wei(subject.chain, claim)

    amounts = await asyncio.gather(*map(recoverable_wei, candidates))
    found = [claim for claim, wei in zip(candidates, amounts, strict=True) if wei is not None]
    if not found:
        raise ConfigError(
            f"nothing of run {subject.run.run_id} can be recovered now",
            hint="only outcomes that are not accepted, final, and not recovered before "
            "count: try again later",
        )
    amount = sum(wei for wei in amounts if wei is not None)
    parts = [found[at : at + RECOVERED_AT_ONCE] for at in range(0, len(found), RECOVERED_AT_ONCE)]
    return Act(
        {
            "frees": f"{format_tokens(amount)} tokens, which were set aside for {len(found)} "
            "outcomes that were not accepted"
        },
        tuple(_recover_step(part) for part in parts),
        values={"outcomes": len(found), "amount_wei": str(amount)},
    )


async def _recoverable_wei(chain: Chain, claim: RewardClaim) -> int | None:
    """Return the wei that the escrow would release for an outcome; None if none can be released
    now."""
    try:
        (amount,) = await chain.read("RewardEscrow", "recover", [[claim]])
    except ContractRevert as error:
        if error.name in _UNRECOVERABLE:
            return None
        raise
    return int(amount)


def _recover_step(claims: Sequence[RewardClaim]) -> OwnerStep:
    return OwnerStep(
        "RewardEscrow.recover",
        lambda chain: chain.escrow.recover(list(claims)),
        size_bytes=size_of_claims(claims),
    )


# Pause, close


async def set_paused(subject: Subject, paused: bool) -> Act:
    """Return the act of pausing submissions, or of ending the pause."""
    subject.require_owner()
    run_id = subject.run.run_id
    if subject.run.paused is paused:
        said, command = ("paused", "resume") if paused else ("not paused", "pause")
        raise ConfigError(
            f"run {run_id} is {said} already", hint=f"to undo it: muster run {command} {run_id}"
        )
    return _one_step(
        {
            "submissions": f"{'no batch' if paused else 'batches'} can be committed"
            + ("" if paused else " again"),
            "stays": "what is committed is judged, paid and slashed" if paused else None,
        },
        "RunRegistry.setSubmissionsPaused",
        lambda chain: chain.runs.set_submissions_paused(run_id, paused),
        paused=paused,
    )


async def pause_slashing(subject: Subject, evidence: Hash32) -> Act:
    """Return the act of pausing slashing for the network's fixed time; for the owner, the
    orchestrator or a validator.
    """
    subject.require_open()
    run, runs, account = subject.run, subject.chain.runs, subject.account
    if account not in (run.owner, run.config.orchestrator, *run.validators):
        raise ConfigError(
            f"{account} is neither owner nor orchestrator nor validator of run {run.run_id}",
            hint="give the keystore of one of them with --keystore",
        )
    cooldown_s, pause_s = await runs.slash_cooldown(), await runs.slash_pause()
    next_at = run.slashing_paused_until + cooldown_s if run.pauses else 0
    if subject.now < next_at:
        raise NotYet(
            f"slashing was paused until {format_time(run.slashing_paused_until)}; again from "
            f"{format_time(next_at)}",
            hint="run the same command again then",
        )
    return _one_step(
        {
            "slashing": f"stops for {format_duration(pause_s)}, and goes on by itself",
            "windows": "of fraud verdicts that are open during the pause are counted from its end",
            "next": f"pause of slashing in {format_duration(pause_s + cooldown_s)} at the earliest",
            "evidence": "0x" + evidence.hex(),
        },
        "RunRegistry.pauseSlashing",
        lambda chain: chain.runs.pause_slashing(run.run_id, PauseCause.OTHER, 0, evidence),
        pause_s=pause_s,
        evidence="0x" + evidence.hex(),
    )


async def close(subject: Subject) -> Act:
    """Return the act of closing a run."""
    subject.require_owner()
    run, period_s = subject.run, await subject.chain.escrow.claim_period()
    return _one_step(
        {
            "run": f"{run.run_id} ends, for good: no batch, no policy, no change after that",
            "yours": f"{format_tokens(run.available_wei)} tokens at once (muster run reclaim)",
            "workers'": f"{format_tokens(run.reserved_wei)} tokens, which they may claim for "
            f"{format_duration(period_s)}; yours is what is left then",
        },
        "RunRegistry.closeRun",
        lambda chain: chain.runs.close_run(run.run_id),
        available_wei=str(run.available_wei),
        claim_period_s=period_s,
    )


# Terms


async def propose_change(subject: Subject, changed: dict[str, int | None]) -> Act:
    """Return the act of announcing new terms; those that are None do not change."""
    subject.require_owner()
    run, now = subject.run, subject.run.config.terms
    terms = replace(now, **{k: v for k, v in changed.items() if v is not None})
    if terms == now:
        raise ConfigError(
            f"run {run.run_id} has these terms already",
            hint="give another --price, --fraud-ppm, --exact-fraud-ppm or --quorum",
        )
    _require_allowed(now, terms, len(run.validators))
    delay_s = await subject.chain.runs.change_delay()
    replaces = run.proposed and "the terms that were announced before, which are dropped"
    return _one_step(
        {
            **_differences(now, terms),
            "replaces": replaces,
            "until then": (
                "the present terms stay in effect, and `muster run change "
                "--cancel` drops the new ones"
            ),
            "then": "anyone can apply it: muster run change --apply",
        },
        "RunRegistry.proposeChange",
        lambda chain: chain.runs.propose_change(run.run_id, terms),
        delay_s,
        price_per_unit_wei=str(terms.price_per_unit),
        quorum=terms.quorum,
        fraud_ppm=terms.fraud_ppm,
        exact_fraud_ppm=terms.exact_fraud_ppm,
    )


def _require_allowed(now: RunTerms, terms: RunTerms, validators: int) -> None:
    least, most = now.price_per_unit // 2, now.price_per_unit * 2
    if not least <= terms.price_per_unit <= most:
        raise ConfigError(
            f"the price may become {format_tokens(least)} to {format_tokens(most)} tokens at "
            f"once, not {format_tokens(terms.price_per_unit)}",
            hint="make several changes, one after another",
        )
    require_ordered_slashes(terms.fraud_ppm, terms.exact_fraud_ppm)
    if not 1 <= terms.quorum <= validators:
        raise ConfigError(
            f"a quorum of {terms.quorum} of {validators} validators is impossible",
            hint=f"give --quorum 1 to {validators}, or invite more validators first: muster "
            "run invite",
        )


def _differences(now: RunTerms, terms: RunTerms) -> dict[str, str]:
    found = {}
    if now.price_per_unit != terms.price_per_unit:
        old, new = format_tokens(now.price_per_unit), format_tokens(terms.price_per_unit)
        found["price"] = f"{old} becomes {new} tokens per unit"
    if now.quorum != terms.quorum:
        found["quorum"] = f"{now.quorum} becomes {terms.quorum}"
    if (now.fraud_ppm, now.exact_fraud_ppm) != (terms.fraud_ppm, terms.exact_fraud_ppm):
        found["slashes"] = format_slashes(terms.fraud_ppm, terms.exact_fraud_ppm)
    return found


async def cancel_change(subject: Subject) -> Act:
    """Return the act of withdrawing an announced change."""
    subject.require_owner()
    run = subject.run
    if run.proposed is None:
        raise _nothing_announced(run)
    return _one_step(
        {"dropped": "the announced terms; the present ones stay in effect"},
        "RunRegistry.cancelChange",
        lambda chain: chain.runs.cancel_change(run.run_id),
    )


async def apply_change(subject: Subject) -> Act:
    """Return the act of applying the announced terms, once due; anyone may."""
    run = subject.run
    if run.proposed is None:
        raise _nothing_announced(run)
    terms, due_at = run.proposed
    if subject.now < due_at:
        left = format_duration(due_at - subject.now)
        raise NotYet(
            f"the announced terms take effect from {format_time(due_at)}, in {left}",
            hint="run the same command again then",
        )
    if terms.quorum > len(run.validators):
        raise ConfigError(
            f"the announced quorum of {terms.quorum} needs more than {len(run.validators)} "
            "validators",
            hint="the owner invites more first: muster run invite",
        )
    return _one_step(
        {**_differences(run.config.terms, terms), "for": "batches that are committed from now on"},
        "RunRegistry.applyChange",
        lambda chain: chain.runs.apply_change(run.run_id),
    )


def _nothing_announced(run: RunView) -> ConfigError:
    return ConfigError(
        f"no change of run {run.run_id} was announced",
        hint="announce one: muster run change --price …",
    )


# People


_AFTER_ROTATION = {
    "trainer": ("stop", "the old trainer's process first: it can publish no more"),
    "orchestrator": (
        "then",
        "start the new one on the old one's --files: it signs work that is not committed again, "
        "which is lost otherwise",
    ),
}


async def rotate(subject: Subject, role: str, fresh: Address) -> Act:
    """Return the act of replacing the run's `trainer` or `orchestrator`."""
    subject.require_owner()
    run_id, old = subject.run.run_id, getattr(subject.run.config, role)
    if old == fresh:
        raise ConfigError(f"{fresh} is the run's {role} already", hint="give another account")

    async def send(chain: Chain) -> Receipt:
        if role == "trainer":
            return await chain.runs.rotate_trainer(run_id, old, fresh)
        return await chain.runs.rotate_orchestrator(run_id, old, fresh)

    name, follows = _AFTER_ROTATION[role]
    facts = {role: f"{old} becomes {fresh}", name: follows}
    return _one_step(facts, f"RunRegistry.rotate{role.title()}", send, old=old, new=fresh)


async def invite(subject: Subject, validator: Address, invited: bool) -> Act:
    """Return the act of inviting a validator, or of withdrawing the invitation."""
    subject.require_owner()
    run = subject.run
    if validator in run.validators:
        raise ConfigError(
            f"{validator} has a seat in run {run.run_id}",
            hint=f"muster run dismiss {run.run_id} takes it back",
        )
    if (validator in run.invited) == invited:
        is_now = "invited already" if invited else "not invited"
        raise ConfigError(f"{validator} is {is_now}", hint="see muster run show")
    needed = await subject.chain.runs.required_validator_stake()
    takes = (
        f"its seat, with {format_tokens(needed)} tokens at least: muster validator join --run "
        f"{run.run_id}"
    )
    return _one_step(
        {"invites": f"{validator}", "it takes": takes} if invited else {"no longer": validator},
        "RunRegistry.invite",
        lambda chain: chain.runs.invite(run.run_id, validator, invited),
        validator=validator,
        invited=invited,
    )


async def dismiss(subject: Subject, validator: Address) -> Act:
    """Return the act of dismissing a validator."""
    subject.require_owner()
    run = subject.run
    if validator not in run.validators:
        raise ConfigError(
            f"{validator} is no validator of run {run.run_id}",
            hint="they are: " + (", ".join(run.validators) or "none"),
        )
    quorum, seats = run.config.terms.quorum, len(run.validators) - 1
    return _one_step(
        {
            "dismisses": f"{validator}; its stake stays its own",
            "quorum": f"{quorum} of {seats}"
            + (": nothing can be judged until another sits" if quorum > seats else ""),
        },
        "RunRegistry.dismiss",
        lambda chain: chain.runs.dismiss(run.run_id, validator),
        validator=validator,
    )
