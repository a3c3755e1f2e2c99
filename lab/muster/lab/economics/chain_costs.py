"""`muster economics --chain`: the cost of a run's transactions on a chain, at given fees.

`make bench-gas` measured the size of each transaction. Their number follows from the recipe and
from assumptions, which are printed and can be changed. No fee of today's chains is assumed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.client.cli.printing import print_facts, print_json, print_table
from muster.lab.economics.chain_fees import ChainKind, Cost, Fees, Footprint, OpScalars, cost_of
from muster.lab.economics.detection import commit_of
from muster.protocol.errors import ConfigError
from muster.settings.flags import find_preset

if TYPE_CHECKING:
    from muster.protocol.recipe import Recipe

F = TypeVar("F", bound=Callable[..., Any])

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results" / "gas.json"
"""Figures measured in this checkout."""
RUN_OF_INTELLECT_2 = "intellect2-long"
"""The preset whose size is used when no recipe is given."""
GWEI, COIN, LARGEST = 10**9, 10**18, 10**12
CLAIMED = 16
"""Outcomes in the measured claim, each from a different batch."""
BASE_SCALARS = OpScalars(base_fee_scalar=2269, blob_fee_scalar=1_055_762)
SCALARS_SOURCE = "Base's since 2024-07-10: base/contract-deployments pull request 188"
NEEDED = {
    ChainKind.BASE: ("gas_price", "base_fee", "blob_fee"),
    ChainKind.ARBITRUM: ("gas_price", "data_price"),
    ChainKind.ETHEREUM: ("gas_price",),
    ChainKind.OWN: ("gas_price",),
}
"""The fees that each kind of chain needs."""
ASKED = {
    "gas_price": "eth_gasPrice says it",
    "base_fee": "GasPriceOracle.l1BaseFee() says it on the chain, eth_feeHistory on the L1",
    "blob_fee": "GasPriceOracle.blobBaseFee() says it on the chain, eth_blobBaseFee on the L1",
    "data_price": "ArbGasInfo.getL1BaseFeeEstimate() says it on the chain",
}
"""Where to look up each fee."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions about a run, and parameters of an OP stack chain."""

    steps: int
    """Rollout steps."""
    submissions_per_step: int
    """Submissions per step."""
    refill_submissions: int
    """Further submissions that each step may request; counted in full."""
    rollouts_per_submission: int
    """Samples of a submission."""
    submissions_per_batch: int = 1
    """Submissions of a batch: 1, 16, 64 or 256, the measured sizes."""
    workers: int = 100
    """Accounts that join the run, and leave in the end."""
    validators: int = 5
    """Accounts that take a seat, and leave in the end."""
    frauds: int = 10
    """Submissions that are slashed."""
    disputes: int = 10
    """Verdicts that a jury decides about."""
    jurors: int = 3
    """Jurors per dispute."""
    direct: int = 0
    """Submissions that workers commit themselves."""
    base_fee_scalar: int = BASE_SCALARS.base_fee_scalar
    """Of an OP stack chain."""
    blob_fee_scalar: int = BASE_SCALARS.blob_fee_scalar
    """Of an OP stack chain."""
    operator_fee_scalar: int = 0
    """Of an OP stack chain."""
    operator_fee_constant: int = 0
    """Of an OP stack chain."""
    times: int = 10
    """Factor on the given fees for a second column."""
    coin_usd: int = 0
    """Price of the chain's coin in USD; 0 to show coins."""

    @property
    def submissions(self) -> int:
        """All submissions of the run."""
        return self.steps * (self.submissions_per_step + self.refill_submissions)

    @property
    def rollouts(self) -> int:
        """All rollouts of the run."""
        return self.submissions * self.rollouts_per_submission

    @property
    def batches(self) -> int:
        """Batches that hold them."""
        return -(-self.submissions // self.submissions_per_batch)

    @property
    def scalars(self) -> OpScalars:
        """What an OP stack chain's owner set."""
        return OpScalars(**{each.name: getattr(self, each.name) for each in fields(OpScalars)})


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of transaction."""

    operation: str
    """Name in `make bench-gas`."""
    what: str
    """Description."""
    payer: str
    """Who sends it."""
    count: int
    """How many a run sends."""


def kinds_of(a: Assumptions) -> list[Kind]:
    """Return every transaction of a run, in the order of its life."""
    # Approvals come first: for the owner's reward, a seat's stake, and the bonds of claims and
    # direct work.
    approvals = 1 + a.validators + a.disputes + a.direct
    outcomes = f"post_outcomes_{a.submissions_per_batch}"
    return [
        Kind("create_run", "create the run", "owner", 1),
        Kind("approve", "let a contract take tokens", "all", approvals),
        Kind("fund", "fund the run", "owner", 1),
        Kind("take_seat", "take a seat", "validator", a.validators),
        Kind("onboard", "a worker joins", "worker", a.workers),
        Kind("publish_checkpoint", "publish a policy", "trainer", a.steps + 1),
        Kind("commit_batch", "commit a batch", "orchestrator", a.batches),
        Kind(outcomes, "post its outcomes", "orchestrator", a.batches),
        Kind("submit_direct", "submit directly", "worker", a.direct),
        Kind("return_bond", "return its bond", "worker", a.direct),
        Kind("claim_16_batches", f"claim {CLAIMED}", "worker", -(-a.submissions // CLAIMED)),
        Kind("execute_fraud", "slash a fraud", "orchestrator", a.frauds),
        Kind("finalise_fraud", "release its escrow", "orchestrator", a.frauds),
        Kind("announce", "announce a claim", "claimant", a.disputes),
        Kind("claim_case", "claim another ruling", "claimant", a.disputes),
        Kind("draw", "draw the jury", "juror", a.disputes),
        Kind("commit_vote", "commit a vote", "juror", a.disputes * a.jurors),
        Kind("reveal_vote", "reveal a vote", "juror", a.disputes * a.jurors),
        Kind("settle_case", "settle the case", "juror", a.disputes),
        Kind("collect_fee", "collect a fee", "juror", a.disputes * a.jurors),
        Kind("request_unbond", "ask for stake back", "all", a.workers + a.validators),
        Kind("withdraw", "withdraw it", "all", a.workers + a.validators),
    ]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of `make bench-gas`."""

    source: str
    """Text with the file, its date and its commit."""
    footprints: dict[str, Footprint]
    """By operation."""

    def of(self, operation: str) -> Footprint:
        """Return an operation's footprint; raises ConfigError when it was not measured."""
        if operation in self.footprints:
            return self.footprints[operation]
        batches = [name.rsplit("_", 1)[1] for name in self.footprints if "post_outcomes_" in name]
        raise ConfigError(
            f"{operation} was not measured: {self.source}",
            hint=f"submissions_per_batch is one of {', '.join(sorted(batches, key=int))}",
        )


def read_measured(path: Path) -> Measured:
    """Return the measurements in a file of `make bench-gas`; raises ConfigError for other files."""
    try:
        document = json.loads(path.read_bytes())
        names = [each.name for each in fields(Footprint)]
        found = {
            operation: Footprint(**{name: int(row[name]) for name in names})
            for operation, row in document["detail"].items()
            if set(names) <= set(row)
        }
        if not found or any(min(asdict(each).values()) < 0 for each in found.values()):
            raise ValueError("no sizes of transactions, or some below zero")
        return Measured(f"{path}, {document['date']}, {commit_of(path)}", found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} does not hold the measured costs of transactions: {error}",
            hint="measure them again with make bench-gas",
        ) from error


# The question: options, recipe and fees


def chain_cost_options(command: F) -> F:
    """Add the options that belong to `--chain`."""
    for option in (
        click.option(
            "--assume",
            multiple=True,
            metavar="NAME=NUMBER",
            help="Change an assumption about the run; repeatable.",
        ),
        click.option(
            "--fee", multiple=True, metavar="NAME=GWEI", help="Fee of the chain; repeatable."
        ),
        click.option(
            "--chain",
            metavar="KIND",
            type=click.Choice([each.value for each in ChainKind]),
            help="Print what transactions cost on such a chain.",
        ),
    ):
        command = option(command)
    return command


def print_chain_costs(options: dict[str, Any], *, as_json: bool) -> None:
    """Print the cost of a run on the chosen chain."""
    from muster.trainer.config import load_recipe

    if options["run"] or options["calibration"]:
        raise ConfigError(
            "--chain prints what transactions cost, --run and --calibration what cheating is worth",
            hint="leave out --chain, or --run and --calibration",
        )
    path = options["recipe"] or find_preset(RUN_OF_INTELLECT_2)
    assert path is not None  # the preset is part of the software
    recipe = load_recipe(path)
    kind = ChainKind(options["chain"])
    priced = Priced(
        kind=kind,
        fees=fees_of(kind, options["fee"]),
        assumed=assumptions_of(recipe, options["assume"]),
        measured=read_measured(RESULTS),
    )
    if as_json:
        print_json({"recipe": recipe.name, **priced.report()})
    else:
        _print(recipe.name, priced)


def assumptions_of(recipe: Recipe, changes: Iterable[str]) -> Assumptions:
    """Return the assumptions of a recipe's run, with the given changes; raises ConfigError."""
    sampling, training = recipe.sampling, recipe.training
    found = Assumptions(
        steps=training.steps,
        submissions_per_step=training.submissions_per_step,
        refill_submissions=recipe.filters.refill_submissions,
        rollouts_per_submission=sampling.problems_per_submission * sampling.samples_per_problem,
    )
    for name, value in _given(changes, [each.name for each in fields(Assumptions)], "--assume"):
        if value != int(value):
            raise ConfigError(
                f"{name} is not a whole number: {value}", hint=f"write it like --assume {name}=10"
            )
        found = replace(found, **{name: int(value)})
    if not (found.rollouts and found.submissions_per_batch and found.times):
        raise ConfigError(
            "the assumed run has no rollouts, no batches or no fees",
            hint="add --assume steps=350 if the recipe has no last step",
        )
    return found


def fees_of(kind: ChainKind, given: Iterable[str]) -> Fees:
    """Return the given fees; raises ConfigError for a missing or an unneeded one."""
    gwei = dict(_given(given, list(ASKED), "--fee"))
    for name in NEEDED[kind]:
        if name not in gwei:
            raise ConfigError(
                f"the {name} of {kind} is missing", hint=f"add --fee {name}=GWEI: {ASKED[name]}"
            )
    if extra := sorted(set(gwei) - set(NEEDED[kind])):
        raise ConfigError(
            f"{kind} has no fee {extra[0]!r}", hint=f"give only {', '.join(NEEDED[kind])}"
        )
    return Fees(**{name: round(value * GWEI) for name, value in gwei.items()})


def _given(words: Iterable[str], names: list[str], flag: str) -> Iterator[tuple[str, Decimal]]:
    """Yield names and numbers; raises ConfigError for an unknown name or a malformed number."""
    for word in words:
        name, _, text = word.partition("=")
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}"
            raise ConfigError(f"{flag} does not know {name!r}", hint=hint)
        try:
            value = Decimal(text)
        except InvalidOperation:
            value = Decimal(-1)
        if not (value.is_finite() and 0 <= value <= LARGEST):
            raise ConfigError(
                f"{name} is not a number: {text!r}", hint=f"write it like {flag} {name}=10"
            )
        yield name, value


# The answer: the priced run


@dataclass(frozen=True, slots=True)
class Priced:
    """A run with its costs on a chain."""

    kind: ChainKind
    """The chain."""
    fees: Fees
    """The chain's fees."""
    assumed: Assumptions
    """The run."""
    measured: Measured
    """Footprints of transactions."""

    def rows(self) -> list[tuple[Kind, Footprint, Cost]]:
        """Return each kind of transaction, its footprint, and the cost of all of that kind."""
        sent = [kind for kind in kinds_of(self.assumed) if kind.count]
        return [(kind, self.measured.of(kind.operation), self._cost(kind)) for kind in sent]

    def _cost(self, kind: Kind, factor: int = 1) -> Cost:
        one = self.measured.of(kind.operation)
        cost = cost_of(self.kind, one, self.fees.times(factor), self.assumed.scalars)
        return cost.times(kind.count)

    def total(self, factor: int = 1) -> Cost:
        """Return the run's total cost, with the fees multiplied by `factor`."""
        costs = [self._cost(kind, factor) for kind in kinds_of(self.assumed) if kind.count]
        return Cost(sum(c.execution_wei for c in costs), sum(c.data_wei for c in costs))

    def gas(self) -> int:
        """Return the gas of all transactions, as measured."""
        return sum(kind.count * taken.gas for kind, taken, _ in self.rows())

    def report(self) -> dict[str, Any]:
        """Return the whole answer as JSON values; amounts in wei as text."""
        return {
            "chain": str(self.kind),
            "fees_wei": {name: str(value) for name, value in asdict(self.fees).items()},
            "assumptions": asdict(self.assumed),
            "measured": self.measured.source,
            "rollouts": self.assumed.rollouts,
            "gas": self.gas(),
            "wei": str(self.total().wei),
            "wei_at_times": str(self.total(self.assumed.times).wei),
            "transactions": [
                {
                    "operation": kind.operation,
                    "payer": kind.payer,
                    "count": kind.count,
                    "gas_each": taken.gas,
                    "execution_wei": str(cost.execution_wei),
                    "data_wei": str(cost.data_wei),
                }
                for kind, taken, cost in self.rows()
            ],
        }


def _print(name: str, priced: Priced) -> None:
    print_facts(_facts(name, priced))
    click.echo()
    columns = ("transaction", "sent by", "count", "gas each", "for gas", "for data", "cost")
    print_table((*columns, f"{priced.assumed.times} x fees"), list(_table(priced)))


def _facts(name: str, priced: Priced) -> dict[str, Any]:
    a = priced.assumed
    charged = ", ".join(
        f"{fee} {Decimal(getattr(priced.fees, fee)) / GWEI:f} gwei" for fee in NEEDED[priced.kind]
    )
    assumed = ", ".join(
        f"{each.name} {getattr(a, each.name)}"
        for each in fields(Assumptions)
        if priced.kind is ChainKind.BASE or not each.name.endswith(("_scalar", "_constant"))
    )
    return {
        "chain": f"{priced.kind}, {charged}: as given, not today's prices",
        "scalars": SCALARS_SOURCE if a.scalars == BASE_SCALARS and "base" in priced.kind else None,
        "run": f"{name}: {a.submissions:,} submissions, {a.rollouts:,} rollouts",
        "assumed": assumed,
        "measured": priced.measured.source,
        "amounts": f"USD at {a.coin_usd:,} a coin" if a.coin_usd else "of the chain's coin",
    }


def _table(priced: Priced) -> Iterable[Sequence[str]]:
    usd = priced.assumed.coin_usd
    for kind, taken, cost in priced.rows():
        yield (
            *(kind.what, kind.payer, f"{kind.count:,}", f"{taken.gas:,}"),
            *_amounts(cost, priced._cost(kind, priced.assumed.times), usd),
        )
    count = sum(kind.count for kind, _, _ in priced.rows())
    total, more = priced.total(), priced.total(priced.assumed.times)
    yield ("the run", "", f"{count:,}", f"{priced.gas():,} in all", *_amounts(total, more, usd))
    share = priced.assumed.rollouts
    each = f"{priced.gas() / share:,.0f}"
    yield ("a rollout", "", "", each, *_amounts(total, more, usd, share))


def _amounts(cost: Cost, more: Cost, usd: int, share: int = 1) -> Iterable[str]:
    for wei in (cost.execution_wei, cost.data_wei, cost.wei, more.wei):
        coins = wei / COIN / share
        yield _dollars(coins * usd) if usd else f"{coins:.4g}"


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 1 else f"${amount:.3g}"
