"""`muster economics`: the expected profit of every adversary of a run, and the stake that deters
it.

For a run on chain, or for planned parameters. The arithmetic is in `muster.protocol`. The cost of a
run's transactions (--chain) is in `muster.lab.economics.chain_costs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.cli.options import FILE, FOLDER, chain_options, endpoint, json_option
from muster.client.cli.printing import print_facts, print_json, print_table
from muster.client.quantities import format_share, format_tokens, parse_tokens
from muster.lab.economics.chain_costs import chain_cost_options, print_chain_costs
from muster.protocol.errors import ConfigError
from muster.settings.flags import RECIPE

if TYPE_CHECKING:
    from muster.chain import Chain, RunTerms
    from muster.deploy import DeployParameters
    from muster.lab.economics.detection import Detection
    from muster.lab.economics.judges import Bench
    from muster.lab.economics.worth import CheatWorth
    from muster.protocol.economics import Cheat, WorkerTerms
    from muster.protocol.recipe import Recipe
    from muster.toploc import Calibration
    from muster.trainer.economics import Fixed

COLUMNS = ("adversary", "noticed", "cheats on", "one file", "a burst", "sybils", "stake", "pays")
"""The columns of the workers' table; amounts are tokens beyond honest work."""
SHOWN_ATTACKS = 3
"""Number of printed attacks of the red team, the least detected ones; --all prints all."""
SHARE = click.FloatRange(0, 1)


@click.command()
@click.option("--run", type=click.IntRange(min=1), help="Run on chain to examine.")
@click.option("--documents", type=FOLDER, help="Folder of the run's documents, named by hash.")
@click.option("--recipe", type=RECIPE, help="Instead of --run: TOML file or preset.")
@click.option("--calibration", type=FILE, help="With --recipe: the calibration.")
@click.option("--price", type=click.IntRange(min=0), metavar="WEI", help="Token wei per unit.")
@click.option(
    "--fraud-ppm",
    type=click.IntRange(0, 10**6),
    metavar="N",
    help="First fraud, in millionths.",
)
@click.option(
    "--exact-fraud-ppm",
    type=click.IntRange(0, 10**6),
    metavar="N",
    help="Exact fraud, in millionths.",
)
@click.option("--quorum", type=click.IntRange(min=1), help="Validators that must agree.")
@click.option("--stake", metavar="TOKENS", help="Stake of the cheater.")
@click.option("--required-stake", metavar="TOKENS", help="Least stake of a worker.")
@click.option("--stake-per-unit", metavar="TOKENS", help="Stake behind a unit in flight.")
@click.option("--unvested", metavar="TOKENS", help="Unpaid reward that a fraud forfeits.")
@click.option("--audit-rate", type=SHARE, help="Share of submissions checked.")
@click.option("--audited-share", type=SHARE, help="Share of their samples checked.")
@click.option("--trap-rate", type=SHARE, help="Share of traps in the work.")
@click.option("--recheck-rate", type=SHARE, help="Share of accepted work rechecked.")
@click.option("--colluding", type=SHARE, help="Share of judges' stake colluding.")
@click.option("--detection", type=SHARE, help="Share of exact frauds found.")
@click.option("--redteam", type=FILE, help="Red team's figures; else this checkout's.")
@click.option("--all", "everything", is_flag=True, help="Print every cheat that was measured.")
@chain_cost_options
@json_option
@chain_options
def economics(as_json: bool, everything: bool, **options: Any) -> None:
    """Print what cheating is worth and the least safe stake. With --chain (base, arbitrum,
    ethereum, own): what a run's transactions cost.

    \b
    Examples:
      muster economics --run 1 --documents documents
      muster economics --recipe demo --calibration calibration.json --audit-rate 0.1
      muster economics --chain arbitrum --fee gas_price=0.01 --fee data_price=0.1
    """
    from muster.lab.economics.detection import detection_of
    from muster.trainer.economics import cheats_of

    if options["chain"]:
        print_chain_costs(options, as_json=as_json)
        return
    if options["fee"] or options["assume"]:
        raise ConfigError(
            "--fee and --assume need a chain", hint="add --chain, such as --chain base"
        )
    detection = detection_of(options["redteam"], options["detection"])
    recipe, calibration, run, fixed, bench = _subject(options)
    terms, bench = _terms(recipe, calibration, run, fixed, bench, options)
    stake = parse_tokens(options["stake"]) if options["stake"] else terms.least_stake
    cheats = detection.applied(cheats_of(calibration))
    if as_json:
        print_json({**report(terms, bench, cheats, stake), **detection_json(terms, detection)})
    else:
        _print(terms, bench, cheats if everything else worst_of(cheats), stake)
        _print_detection(terms, detection, most=None if everything else SHOWN_ATTACKS)


# The subject


def _subject(options: dict[str, Any]) -> tuple[Recipe, Calibration, RunTerms, Fixed, Bench]:
    """Return the recipe, the calibration, the run's terms, and the deployment's for both sides."""
    import asyncio

    if options["run"]:
        return asyncio.run(_of_run(options))
    return _of_files(options)


async def _of_run(options: dict[str, Any]) -> tuple[Recipe, Calibration, RunTerms, Fixed, Bench]:
    from muster.chain import Chain
    from muster.protocol.ids import RunId
    from muster.protocol.recipe import Recipe
    from muster.toploc import Calibration
    from muster.trainer.economics import read_fixed

    if not options["documents"]:
        raise ConfigError(
            f"the chain holds only hashes of run {options['run']}'s recipe and calibration",
            hint="give the folder that `muster run create` wrote, with --documents",
        )
    async with await Chain.connect(*endpoint(options)) as chain:
        config = await chain.runs.config_of(RunId(options["run"]))
        fixed, bench = await read_fixed(chain), await read_bench(chain, config.terms.quorum)
    recipe = Recipe.from_bytes(_document(options["documents"], config.recipe_hash))
    calibration = Calibration.from_bytes(_document(options["documents"], config.calibration_hash))
    return recipe, calibration, _overridden(config.terms, options), fixed, bench


async def read_bench(chain: Chain, quorum: int) -> Bench:
    """Return the judges' terms of a run, from the deployed contracts."""
    from muster.lab.economics.judges import Bench

    court = await chain.court.terms()
    return Bench(
        quorum=quorum,
        validator_stake=await chain.runs.required_validator_stake(),
        wrong_verdict_ppm=court.wrong_verdict_ppm,
        bond=court.bond,
        reporter_ppm=await chain.vault.reporter_ppm(),
        reporter_cap=await chain.vault.reporter_cap(),
        jury_size=court.jury_size,
        juror_stake=await chain.jurors.required_stake(),
        juror_fee=court.juror_fee,
        absence_ppm=court.absence_ppm,
    )


def bench_by(parameters: DeployParameters, quorum: int) -> Bench:
    """Return the judges' terms of a run, from parameters of a deployment."""
    from muster.lab.economics.judges import Bench

    return Bench(
        quorum=quorum,
        validator_stake=parameters.required_validator_stake,
        wrong_verdict_ppm=parameters.wrong_verdict_ppm,
        bond=parameters.bond,
        reporter_ppm=parameters.reporter_ppm,
        reporter_cap=parameters.reporter_cap,
        jury_size=parameters.jury_size,
        juror_stake=parameters.required_juror_stake,
        juror_fee=parameters.juror_fee,
        absence_ppm=parameters.absence_ppm,
    )


def _document(folder: Path, pinned: bytes) -> bytes:
    from muster.protocol.encoding import keccak

    data = _read(folder / pinned.hex())
    if keccak(data) != pinned:
        raise ConfigError(
            f"{folder / pinned.hex()} is not the document that the run pins",
            hint="give the folder that `muster run create` wrote, with --documents",
        )
    return data


def _of_files(options: dict[str, Any]) -> tuple[Recipe, Calibration, RunTerms, Fixed, Bench]:
    from muster.chain import RunTerms
    from muster.deploy import DeployParameters
    from muster.toploc import Calibration
    from muster.trainer.config import load_recipe
    from muster.trainer.economics import TOKEN, fixed_by

    if not options["recipe"] or not options["calibration"]:
        raise ConfigError(
            "neither --run nor --recipe with --calibration is given",
            hint="for example: muster economics --recipe demo --calibration calibration.json",
        )
    calibration = Calibration.from_bytes(_read(options["calibration"]))
    run = _overridden(RunTerms(TOKEN // 1000, 100_000, 500_000, 2), options)
    recipe, parameters = load_recipe(options["recipe"]), DeployParameters()
    return recipe, calibration, run, fixed_by(parameters), bench_by(parameters, run.quorum)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _overridden(run: RunTerms, options: dict[str, Any]) -> RunTerms:
    from muster.client.preflight import require_ordered_slashes

    given = {"price_per_unit": options["price"]} | {
        name: options[name] for name in ("fraud_ppm", "exact_fraud_ppm", "quorum")
    }
    changed = replace(run, **{name: value for name, value in given.items() if value is not None})
    require_ordered_slashes(changed.fraud_ppm, changed.exact_fraud_ppm)
    return changed


def _terms(
    recipe: Recipe,
    calibration: Calibration,
    run: RunTerms,
    fixed: Fixed,
    bench: Bench,
    options: dict[str, Any],
) -> tuple[WorkerTerms, Bench]:
    from muster.trainer.economics import terms_of

    amounts = {
        field: parse_tokens(options[flag])
        for flag, field in (
            ("required_stake", "required_stake"),
            ("stake_per_unit", "stake_per_unit"),
            ("unvested", "unvested_wei"),
        )
        if options[flag]
    }
    workers = ("audit_rate", "audited_share")
    judges = ("trap_rate", "recheck_rate", "colluding")
    return (
        replace(terms_of(recipe, calibration, run, fixed), **amounts, **_given(options, workers)),
        replace(bench, quorum=run.quorum, **_given(options, judges)),
    )


def _given(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: options[name] for name in names if options[name] is not None}


# The answer


def worst_of(cheats: Sequence[Cheat]) -> list[Cheat]:
    """Return the cheats that are detected least: of the exact ones, and for each saving."""
    worst: dict[tuple[bool, float], Cheat] = {}
    for cheat in cheats:
        key = (cheat.exact, cheat.saving)
        if key not in worst or cheat.power < worst[key].power:
            worst[key] = cheat
    return list(worst.values())


def report(terms: WorkerTerms, bench: Bench, cheats: Sequence[Cheat], stake: int) -> dict[str, Any]:
    """Return the whole answer as JSON values; amounts in wei as text."""
    from muster.lab.economics.worth import assess
    from muster.protocol import economics as model

    found = [assess(terms, cheat, stake) for cheat in cheats]
    return {
        "terms": _texts(asdict(terms)),
        "bench": _texts(asdict(bench)),
        "stake_wei": str(stake),
        "safe": not model.pays(terms, cheats),
        "minimal_stake_wei": _text(minimal_stake(found)),
        "cap_units": cap_units(found),
        "remedies": _texts(asdict(model.remedies(terms, cheats))),
        "workers": [_row(finding) for finding in found],
        "judges": judges_of(terms, bench, stake),
    }


def _row(finding: CheatWorth) -> dict[str, Any]:
    return {
        "adversary": finding.cheat.name,
        "power": finding.cheat.power,
        "saving": finding.cheat.saving,
        "exact": finding.cheat.exact,
        "cheated_samples": finding.best.cheated,
        "lost": finding.best.lost,
        "fraud": finding.best.fraud,
        "profit_wei": str(round(finding.profit_wei)),
        "burst_wei": str(round(finding.burst_wei)),
        "sybils": finding.sybils,
        "sybils_wei": str(round(finding.sybils_wei)),
        "minimal_stake_wei": _text(finding.minimal_stake),
        "cap_units": finding.cap_units,
        "break_even_saving": finding.break_even_saving,
        "pays": finding.pays,
    }


def _texts(values: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping with integers that JSON readers would round as text."""
    return {k: str(v) if isinstance(v, int) and v >= 1 << 53 else v for k, v in values.items()}


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


def minimal_stake(found: Sequence[CheatWorth]) -> int | None:
    """Return the smallest stake that deters every cheat that saves something; None if there is
    none."""
    stakes = [f.minimal_stake for f in found if f.cheat.saving > 0]
    return None if any(s is None for s in stakes) else max((s or 0 for s in stakes), default=0)


def cap_units(found: Sequence[CheatWorth]) -> int | None:
    """Return the largest safe number of units in flight; None for any number."""
    return min((f.cap_units for f in found if f.cap_units is not None), default=None)


def detection_json(terms: WorkerTerms, detection: Detection) -> dict[str, Any]:
    """Return the source of the checks' power, and the profit of the red team's cheats on whole
    files."""
    return {
        "detection": {
            "source": detection.source,
            "given": detection.given,
            "files": [
                {
                    "attack": each.attack,
                    "title": each.title,
                    "trials": each.trials,
                    "caught": each.caught,
                    "power": each.power,
                    "penalty_wei": str(round(penalty_of(terms, each.power))),
                }
                for each in detection.files()
            ],
        }
    }


def penalty_of(terms: WorkerTerms, power: float) -> float:
    """Return in wei the penalty, besides the lost pay, at which forging whole files does not pay;
    MAX_STAKE if it is never detected.
    """
    from muster.lab.economics.worth import classical_stake
    from muster.protocol.economics import MAX_STAKE

    return min(classical_stake(terms.units * terms.price_wei, terms.audit_rate, power), MAX_STAKE)


def judges_of(terms: WorkerTerms, bench: Bench, stake: int) -> list[dict[str, Any]]:
    """Return the judges' expected profits, and what deters them."""
    from muster.lab.economics import judges

    traps = judges.lazy_trap_rate(terms, bench)
    rechecks = judges.collusion_recheck_rate(terms, bench, stake)
    bond = judges.minimal_bond(terms, bench, stake)
    return [
        {
            "adversary": "lazy validator, accepts unseen",
            "profit_wei": str(round(judges.lazy_profit(terms, bench))),
            "deterred_by": f"traps in {traps:.3%} of its work (now {bench.trap_rate:.3%})",
        },
        {
            "adversary": f"{bench.quorum} colluding validators, accept a forged file",
            "profit_wei": str(round(judges.collusion_profit(terms, bench, stake))),
            "deterred_by": f"{rechecks:.3%} of accepted files checked again "
            f"(assumed {bench.recheck_rate:.3%})",
        },
        {
            "adversary": "false accuser, claims that an honest file is fraud",
            "profit_wei": str(round(judges.accuser_profit(terms, bench, stake))),
            "deterred_by": "no bond"
            if bond is None
            else f"a bond of {_rounded(bond)} tokens (now {_rounded(bench.bond)})",
        },
        {
            "adversary": "extorting validators, call honest work fraud",
            "profit_wei": str(round(judges.extortion_profit(bench))),
            "deterred_by": "judges get no share of a slash",
        },
        {
            "adversary": "juror that stays away from a case",
            "profit_wei": str(round(judges.absent_juror_profit(terms, bench))),
            "deterred_by": f"its fee, and {format_share(bench.absence_ppm)} of its stake",
        },
        {
            "adversary": "juror that votes unseen, guesses",
            "profit_wei": str(round(judges.guessing_juror_profit(terms, bench))),
            "deterred_by": f"a fee of {format_tokens(bench.juror_fee)} tokens for a right vote",
        },
    ]


# For people


def _print(terms: WorkerTerms, bench: Bench, cheats: Sequence[Cheat], stake: int) -> None:
    from muster.lab.economics.worth import assess

    found = [assess(terms, cheat, stake) for cheat in cheats]
    print_facts(_facts(terms, found, stake))
    click.echo()
    print_table(COLUMNS, [_cells(finding, terms) for finding in found])
    click.echo()
    print_table(
        ("judges", "profit", "deterred by"),
        [
            (row["adversary"], _tokens(int(row["profit_wei"])), row["deterred_by"])
            for row in judges_of(terms, bench, stake)
        ],
    )


def _print_detection(terms: WorkerTerms, detection: Detection, *, most: int | None) -> None:
    click.echo()
    print_facts({"detection": detection.source})
    rows = [
        (
            f"{each.attack} {each.title}",
            f"{each.caught} of {each.trials}",
            f"{each.power:.1%}",
            _rounded(round(penalty_of(terms, each.power))) if each.power else "nothing",
        )
        for each in detection.files()[:most]
    ]
    if rows:
        print_table(("red team, whole files", "caught", "at least", "deterred by"), rows)


def _facts(terms: WorkerTerms, found: Sequence[CheatWorth], stake: int) -> dict[str, Any]:
    least, cap = minimal_stake(found), cap_units(found)
    return {
        "pays": f"{format_tokens(terms.price_wei)} tokens per unit, at most {terms.units:,} units "
        f"({format_tokens(terms.units * terms.price_wei)} tokens) per submission",
        "slashes": f"{format_share(terms.fraud_ppm)} for a first statistical fraud "
        f"({terms.fraud_strikes} samples), {format_share(terms.exact_fraud_ppm)} for an exact one",
        "checks": f"{terms.audit_rate:.1%} of submissions, {terms.audited_share:.1%} of their "
        "samples",
        "at stake": f"{format_tokens(stake)} tokens; {format_tokens(terms.least_stake)} bring work",
        "safe stake": "none is enough"
        if least is None
        else f"{_rounded(least)} tokens; twice that against gamblers",
        "in flight": f"{stake // terms.stake_per_unit:,} units allowed, "
        + ("any number is safe" if cap is None else f"{cap:,} are safe"),
        "verdict": "cheating pays" if any(f.pays for f in found) else "cheating does not pay",
    }


def _cells(finding: CheatWorth, terms: WorkerTerms) -> tuple[str, ...]:
    least = finding.minimal_stake
    return (
        finding.cheat.name,
        f"{finding.cheat.power:.1%}",
        f"{finding.best.cheated} of {terms.samples}",
        _tokens(finding.profit_wei),
        _tokens(finding.burst_wei),
        f"{_tokens(finding.sybils_wei)} ({finding.sybils})",
        "-" if least is None else _rounded(least),
        _pays(finding),
    )


def _pays(finding: CheatWorth) -> str:
    least = finding.break_even_saving
    if finding.pays or finding.cheat.saving > 0 or least >= 1:
        return "yes" if finding.pays else "no"
    return f"if it saves {least:.1%}" if least > 0 else "if it saves any"


def _tokens(wei: float) -> str:
    return f"{wei / 10**18:+,.4g}"


def _rounded(wei: int) -> str:
    """Return an amount of tokens, rounded up to six significant digits."""
    digits = max(len(str(wei)) - 6, 0)
    return format_tokens(-(-wei // 10**digits) * 10**digits)
