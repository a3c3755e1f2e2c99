"""`muster audit verify`: one verdict re-run from an evidence bundle, on this machine alone.

No orchestrator, relay or validator is asked. The chain is, for the facts that the verdict rests on;
with --offline they are the bundle's, and are printed to be compared. Exits 1 when anything
contradicts. `--json` prints one line:

    {"submission", "verdict", "agrees", "facts",
     "checks": [{"name", "answer": "agree|contradict|-", "detail"}]}
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.options import FILE, FOLDER, chain_options, endpoint, engine_options, json_option
from muster.client.printing import print_facts, print_json, printable
from muster.protocol.errors import ConfigError

if TYPE_CHECKING:
    from muster.client.bundle import Bundle, ChainFacts, Evidence
    from muster.client.bundle_checks import Check
    from muster.shardcast import Manifest

COLOURS = {"agree": "green", "contradict": "red", "-": "bright_black"}


@click.command("verify")
@click.argument("submission")
@click.option("--bundle", type=FILE, required=True, help="Its evidence bundle.")
@click.option("--policy", type=FOLDER, help="The policy's files, if the bundle lacks them.")
@click.option("--offline", is_flag=True, help="Ask no chain: print the bundle's facts instead.")
@engine_options
@json_option
@chain_options
def verify(submission: str, as_json: bool, **options: Any) -> None:
    """Re-run a verdict from its evidence bundle.

    The submission is named as BATCH:POSITION, by its file's hash or a transaction's, or six digits
    of one; with --offline not by a transaction.

    Every check says agree or contradict. muster explain --save writes bundles.

    \b
    Examples:
      muster audit verify 12:3 --bundle evidence.zip
      muster audit verify 12:3 --bundle evidence.zip --offline --json
    """
    import asyncio

    from muster.client.bundle_checks import is_borne_out

    evidence, facts, checks = asyncio.run(_verify(submission, options))
    found = to_json(evidence, facts, checks)
    if as_json:
        print_json(found)
    else:
        _print(found, checks, facts if options["offline"] else None)
    if not is_borne_out(checks):
        sys.exit(1)


async def _verify(
    submission: str, options: dict[str, Any]
) -> tuple[Evidence, ChainFacts, list[Check]]:
    from muster.client.bundle import Bundle

    with ExitStack() as stack:
        bundle = stack.enter_context(Bundle(options["bundle"]))
        evidence = bundle.evidence()
        chain = None
        if options["offline"]:
            require_about(evidence, submission)
        else:
            chain = await read_facts(evidence, submission, options)
        facts = chain or evidence.facts
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-")))
        checks = await verify_bundle(bundle, evidence, (facts, chain), folder, options)
        return evidence, facts, checks


def require_about(
    evidence: Evidence, submission: str, found: tuple[int, int] | None = None
) -> None:
    """Raise ConfigError when a bundle is about another submission.

    `found` is the place of what the text names on chain, if a chain was asked.
    """
    from muster.chain import is_named

    place = (evidence.batch_id, evidence.position)
    file_hash = evidence.entry.submission.file_hash
    if found != place and not is_named(submission, place, file_hash):
        raise ConfigError(
            f"the bundle is about submission {place[0]}:{place[1]}, file 0x{file_hash.hex()}, "
            f"not {submission}",
            hint="name the one it is about, or give its own bundle",
        )


async def read_facts(evidence: Evidence, submission: str, options: dict[str, Any]) -> ChainFacts:
    """Return what the chain says about a bundle's submission.

    Raises ConfigError when the chain knows no such verdict.
    """
    from muster.chain import Chain, find_outcome, read_view
    from muster.client.bundle import facts_of
    from muster.client.facts import HistoryView
    from muster.client.rerun import claim_at

    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, HistoryView())
        named = find_outcome(view, submission)
        require_about(evidence, submission, (named.batch.batch_id, named.position))
        batch = find_outcome(view, f"{evidence.batch_id}:{evidence.position}").batch
        if batch.records is None:
            raise ConfigError(
                f"nobody judged batch {batch.batch_id} on chain {chain.chain_id}",
                hint="check --rpc: is it the chain that the bundle is from?",
            )
        domain = chain.domain("ContributionLedger")
        claim = claim_at(view, batch, evidence.entries, evidence.position, domain)
        return facts_of(view.runs[batch.run_id], batch, claim, domain)


async def verify_bundle(
    bundle: Bundle,
    evidence: Evidence,
    known: tuple[ChainFacts, ChainFacts | None],
    folder: Path,
    options: dict[str, Any],
) -> list[Check]:
    """Return every check, in order; a part that is not the pinned one ends them.

    `known` are the facts to go by, and the chain's if it was asked; `folder` is for weights.
    """
    from muster.client import bundle_checks as held

    facts, chain = known
    rests_on = [held.check_batch(evidence, facts), held.check_documents(bundle, facts)]
    checks = [
        held.check_facts(evidence.facts, chain),
        held.check_outcomes(evidence, facts),
        *rests_on,
    ]
    if not held.is_borne_out(rests_on):
        return checks
    manifest = held.read_manifest(bundle, facts)
    if facts.policy is not None:
        weights = _find_weights(bundle, manifest, folder, options["policy"])
        checks.append(weights)
        if not held.is_borne_out([weights]):
            return checks
    return [
        *checks,
        *await _recompute(bundle, evidence, facts, options["policy"] or folder, options),
    ]


def _find_weights(
    bundle: Bundle, manifest: Manifest | None, folder: Path, given: Path | None
) -> Check:
    """Return whether the weights are the chain's; those of the bundle are put into `folder`."""
    from muster.client.bundle_checks import Answer, Check, check_weights

    if manifest is None:
        return Check("policy", Answer.CONTRADICT, "its manifest is not the one on chain")
    if given is not None:
        return check_weights(manifest, given)
    if not bundle.has_weights():
        raise ConfigError(
            f"the bundle has no weights of policy {manifest.version}",
            hint="--policy FOLDER: muster doctor and muster explain --rerun keep them in "
            "~/.muster/doctor/policies",
        )
    for file in manifest.files:
        if not bundle.unpack(file.name, file.size, folder / file.name):
            return Check("policy", Answer.CONTRADICT, f"{file.name} is not as its manifest says")
    return check_weights(manifest, folder)


async def _recompute(
    bundle: Bundle, evidence: Evidence, facts: ChainFacts, policy: Path, options: dict[str, Any]
) -> list[Check]:
    """Return what the validators' own checks say on this machine."""
    import asyncio

    from muster.client.bundle import CALIBRATION, RECIPE, SUBMISSION, TASK_SET
    from muster.client.bundle_checks import check_verdict, claim_of, recorded_of
    from muster.client.doctor.command import load_transformers
    from muster.client.rerun import recompute
    from muster.client.validator.decoding import FileDecoder
    from muster.client.validator.judging import Rules
    from muster.client.validator.process import require_consistent
    from muster.protocol.recipe import Recipe
    from muster.tasks import TaskSet
    from muster.toploc import Calibration

    rules = Rules(
        recipe=Recipe.from_bytes(bundle.part(RECIPE) or b""),
        task_set=TaskSet.from_bytes(bundle.part(TASK_SET) or b""),
        calibration=Calibration.from_bytes(bundle.part(CALIBRATION) or b""),
    )
    require_consistent(rules)
    load = load_transformers(options["threads"] or 1)
    engine = load(options["dtype"] or "float32", options["device"] or "cpu")
    claim = claim_of(evidence, facts)
    if facts.policy is not None:
        version = claim.submission.policy_version
        await asyncio.to_thread(engine.load_policy, policy, version)
    data = require_file(bundle.part(SUBMISSION), claim.submission.file_hash)
    async with FileDecoder() as decoder:
        again = await recompute(claim, data, rules, engine, decoder)
    return check_verdict(recorded_of(evidence), again)


def require_file(data: bytes | None, expected: bytes) -> bytes:
    """Return the submission's file; raises ConfigError when it is missing or another."""
    from muster.protocol.encoding import file_hash

    if data is None or file_hash(data) != expected:
        found = "no file" if data is None else f"a file of hash 0x{file_hash(data).hex()}"
        raise ConfigError(
            f"the bundle has {found}, the submission's is 0x{expected.hex()}",
            hint="without the committed file nothing can be recomputed",
        )
    return data


def to_json(evidence: Evidence, facts: ChainFacts, checks: list[Check]) -> dict[str, Any]:
    """Return what was found, as JSON values."""
    from muster.client.bundle_checks import is_borne_out, recorded_of

    return {
        "submission": f"{evidence.batch_id}:{evidence.position}",
        "verdict": recorded_of(evidence).verdict.name.lower(),
        "agrees": is_borne_out(checks),
        "facts": facts.model_dump(mode="json"),
        "checks": [asdict(check) for check in checks],
    }


def _print(found: dict[str, Any], checks: list[Check], stated: ChainFacts | None) -> None:
    for check in checks:
        mark = click.style(f"{check.answer:10}", fg=COLOURS[check.answer])
        name = check.name.split(":")[0]
        click.echo(f"{mark}  {name:20}  {printable(check.detail)}".rstrip())
    if stated is not None:
        click.echo("\nStated by the bundle, to compare with the chain:")
        print_facts({name: str(value) for name, value in stated.model_dump(mode="json").items()})
    verdict = f"verdict {found['verdict']} of submission {found['submission']}"
    if found["agrees"]:
        click.echo(click.style(f"{verdict}: nothing contradicts", fg="green", bold=True))
    else:
        wrong = ", ".join(c.name.split(":")[0] for c in checks if c.answer == "contradict")
        click.echo(click.style(f"{verdict}: contradicted by {wrong}", fg="red", bold=True))
