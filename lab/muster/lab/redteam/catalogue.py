"""The catalogue: every attack A1 to A40, either a program or the reason why it cannot arise here.

The numbers are those of the project's survey of networks of this kind; docs/security/red-team.md
is made of this and of the last full run.
"""

from dataclasses import dataclass, replace

from muster.lab.redteam import (
    claims,
    contracts,
    drifting,
    economy,
    forging,
    judges,
    models,
    reorg,
    sampling,
    weights,
)
from muster.lab.redteam.contracts import on_chain
from muster.lab.redteam.network import PLAYED, in_network
from muster.lab.redteam.trials import Attack, Variant


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """An attack that is no program, and why."""

    id: str
    """Its number."""
    title: str
    """The attack, in words."""
    reason: str
    """Why it cannot arise, or where it is measured instead."""


ON_CHAIN_TOO = ("A8", "A9", "A10", "A29")
"""Attacks on work or requests that the contracts meet as well."""


def _all_attacks() -> dict[str, Attack]:
    found = [
        *models.ATTACKS, *sampling.ATTACKS, *forging.ATTACKS, *claims.ATTACKS,
        *contracts.ATTACKS, *economy.ATTACKS, *weights.ATTACKS, *reorg.ATTACKS,
        *judges.ATTACKS,
    ]  # fmt: skip
    by_id = {attack.id: attack for attack in found}
    assert len(by_id) == len(found)  # each number must be used once
    also: list[tuple[str, tuple[Variant, ...]]] = []
    also += [(name, (on_chain(name),)) for name in ON_CHAIN_TOO]
    also += [(name, in_network(name)) for name in PLAYED]
    also += [("A15", drifting.VARIANTS)]
    for name, variants in also:
        by_id[name] = replace(by_id[name], variants=by_id[name].variants + variants)
    return dict(sorted(by_id.items(), key=lambda item: int(item[0][1:])))


ATTACKS = _all_attacks()
"""By number."""

ELSEWHERE = (
    Elsewhere(
        "A36",
        "honest work slashed because machines compute differently",
        "no attack but the price of the defences: the honest matrix measures it below",
    ),
    Elsewhere(
        "A40",
        "a poisoned update of the node's software",
        "nothing updates itself: a node runs what its operator installed, recipes name the least "
        "version and pin verifiers by the hash of their code",
    ),
)
"""Attacks that are not played."""
