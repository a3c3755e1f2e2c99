"""Runs one verdict again from an evidence bundle, on this machine alone: `muster audit verify`.

No orchestrator, relay or validator is asked. The facts that the verdict rests on are read from the
chain. With --offline they come from the bundle, and are printed so that people can compare them.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from muster.chain import Chain, find_outcome, is_named, read_view
from muster.client.chain_facts import HistoryView
from muster.client.cli.options import endpoint
from muster.client.cli.printing import print_facts, printable
from muster.client.disputes.bundle import (
    CALIBRATION,
    RECIPE,
    SUBMISSION,
    TASK_SET,
    Bundle,
    ChainFacts,
    Evidence,
    facts_of,
)
from muster.client.disputes.bundle_checks import (
    BundleCheck,
    CheckAnswer,
    check_batch,
    check_documents,
    check_facts,
    check_outcomes,
    check_verdict,
    check_weights,
    claim_of,
    is_borne_out,
    read_manifest,
    recorded_of,
)
from muster.client.disputes.rerun import SILENCE_S, claim_at, recompute
from muster.client.run_documents import require_consistent
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.judging import Rules
from muster.inference.loading import engine_of
from muster.protocol.encoding import file_hash
from muster.protocol.errors import ConfigError
from muster.protocol.messages import Verdict
from muster.protocol.recipe import Recipe
from muster.shardcast import Manifest
from muster.tasks import TaskSet
from muster.toploc import Calibration

COLOURS = {"agree": "green", "contradict": "red", "-": "bright_black"}


async def verify(
    submission: str, options: dict[str, Any]
) -> tuple[Evidence, ChainFacts, list[BundleCheck]]:
    """Return a bundle's evidence, the facts that it was compared with, and every check.

    Raises ConfigError when the bundle is not about the named submission.
    """
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

    `found` is the place on chain of the named submission, if a chain was asked.
    """
    place = (evidence.batch_id, evidence.position)
    own = evidence.entry.submission.file_hash
    if found != place and not is_named(submission, place, own):
        raise ConfigError(
            f"the bundle is about submission {place[0]}:{place[1]}, file 0x{own.hex()}, "
            f"not {submission}",
            hint="give the submission that the bundle is about, or another --bundle",
        )


async def read_facts(evidence: Evidence, submission: str, options: dict[str, Any]) -> ChainFacts:
    """Return what the chain says about a bundle's submission.

    Raises ConfigError when the chain knows no such verdict.
    """
    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, HistoryView())
        named = find_outcome(view, submission)
        require_about(evidence, submission, (named.batch.batch_id, named.position))
        place = find_outcome(view, f"{evidence.batch_id}:{evidence.position}")
        batch = place.batch
        if batch.records is None:
            raise ConfigError(
                f"nobody judged batch {batch.batch_id} on chain {chain.chain_id}",
                hint="give an endpoint of the bundle's chain with --rpc",
            )
        domain = chain.domain("ContributionLedger")
        claim = claim_at(view, batch, evidence.entries, evidence.position, domain)
        return facts_of(view, place, claim, domain)


async def verify_bundle(
    bundle: Bundle,
    evidence: Evidence,
    known: tuple[ChainFacts, ChainFacts | None],
    folder: Path,
    options: dict[str, Any],
) -> list[BundleCheck]:
    """Return the checks in order; they end where a hash is not the pinned one.

    `known` are the facts to use, and the chain's facts if it was asked; `folder` is for weights.
    """
    facts, chain = known
    rests_on = [check_batch(evidence, facts), check_documents(bundle, facts)]
    checks = [
        check_facts(evidence.facts, chain),
        check_outcomes(evidence, facts, is_of_chain=chain is not None),
        *rests_on,
    ]
    if not is_borne_out(rests_on):
        return checks
    manifest = read_manifest(bundle, facts)
    if facts.policy is not None:
        weights = _find_weights(bundle, manifest, folder, options["policy"])
        checks.append(weights)
        if not is_borne_out([weights]):
            return checks
    return [
        *checks,
        *await _recompute(bundle, evidence, facts, options["policy"] or folder, options),
    ]


def _find_weights(
    bundle: Bundle, manifest: Manifest | None, folder: Path, given: Path | None
) -> BundleCheck:
    """Return whether the weights are those on chain; the bundle's are written to `folder`."""
    if manifest is None:
        return BundleCheck("policy", CheckAnswer.CONTRADICT, "its manifest is not the one on chain")
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
            return BundleCheck(
                "policy", CheckAnswer.CONTRADICT, f"{file.name} is not as its manifest says"
            )
    return check_weights(manifest, folder)


async def _recompute(
    bundle: Bundle, evidence: Evidence, facts: ChainFacts, policy: Path, options: dict[str, Any]
) -> list[BundleCheck]:
    """Return the result of the validators' own checks on this machine."""
    rules = Rules(
        recipe=Recipe.from_bytes(bundle.part(RECIPE) or b""),
        task_set=TaskSet.from_bytes(bundle.part(TASK_SET) or b""),
        calibration=Calibration.from_bytes(bundle.part(CALIBRATION) or b""),
    )
    require_consistent(rules)
    engine = engine_of(options, silence_s=SILENCE_S)
    claim = claim_of(evidence, facts)
    data = require_file(bundle.part(SUBMISSION), claim.submission.file_hash)
    async with FileDecoder() as decoder:
        folder = policy if facts.policy is not None else None
        again = await recompute(claim, data, rules, engine, decoder, folder=folder)
    return check_verdict(recorded_of(evidence), again, ruling=facts.stands)


def require_file(data: bytes | None, expected: bytes) -> bytes:
    """Return the submission's file; raises ConfigError when it is missing or has another hash."""
    if data is None or file_hash(data) != expected:
        found = "no file" if data is None else f"a file of hash 0x{file_hash(data).hex()}"
        raise ConfigError(
            f"the bundle has {found}, the submission's is 0x{expected.hex()}",
            hint="without the committed file nothing can be recomputed",
        )
    return data


def to_json(evidence: Evidence, facts: ChainFacts, checks: list[BundleCheck]) -> dict[str, Any]:
    """Return the result as JSON values, with the verdict that stands:

    {"submission", "verdict", "agrees", "facts",
     "checks": [{"name", "answer": "agree|contradict|-", "detail"}]}
    """
    ruling = facts.stands
    verdict = recorded_of(evidence).verdict if ruling is None else Verdict(ruling >> 8)
    return {
        "submission": f"{evidence.batch_id}:{evidence.position}",
        "verdict": verdict.name.lower(),
        "agrees": is_borne_out(checks),
        "facts": facts.model_dump(mode="json"),
        "checks": [asdict(check) for check in checks],
    }


def print_verdict(
    found: dict[str, Any], checks: list[BundleCheck], stated: ChainFacts | None
) -> None:
    """Print every check and the result; `stated` are facts from the bundle alone."""
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
