"""The suite notices a missing defence: each defence is removed in memory, and the suite must report
that its attack succeeds. The attacks themselves are in the catalogue.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from muster.client.validator import batches, checks, judging
from muster.lab.redteam import contracts, drifting, economy, forging, judges, reorg
from muster.lab.redteam.catalogue import ATTACKS
from muster.lab.redteam.runner import failures, run
from muster.lab.redteam.stage import Stage
from muster.lab.redteam.trials import Attack
from muster.orchestrator.http.signers import NonceStore
from muster.protocol.encoding import file_hash, keccak
from muster.shardcast import fetcher
from muster.shardcast.chunks import VerifyingSink
from muster.tasks import Graded
from muster.toploc.sequential_test import WorkerHistory

TRIALS = 4
"""Trials of each attack: without its defence it succeeds at once."""
Patch = pytest.MonkeyPatch
TakeOut = Callable[[Patch], None]
"""Removes a defence."""


def nothing(*_: Any, **__: Any) -> None:
    """Find nothing in any submission."""


def without(module: object, name: str) -> TakeOut:
    """Return a function that leaves one check out."""
    return lambda patch: patch.setattr(module, name, nothing)


def no_signatures(patch: Patch) -> None:
    patch.setattr(checks, "is_signed_by_node", lambda _claim: True)


def no_slots(patch: Patch) -> None:
    patch.setattr(batches.SlotIndex, "is_used", lambda *_, **__: False)


def any_text_is_right(patch: Patch) -> None:
    patch.setattr(forging, "verify", lambda _problem, _text: Graded(1.0))


def no_memory_of_nonces(patch: Patch) -> None:
    """Remember nonces neither in memory nor in the database, which is the second check."""

    async def keep(*_: Any) -> None:
        pass

    patch.setattr(NonceStore, "take", lambda *_: None)
    patch.setattr(NonceStore, "keep", keep)


def no_statistics(patch: Patch) -> None:
    """Remove both checks: text of another model fails the second one, too."""
    patch.setattr(judging, "check_proofs", nothing)
    patch.setattr(judging, "check_sampling", nothing)


def any_file_will_do(patch: Patch) -> None:
    patch.setattr("muster.api.client.file_hash", lambda data: _Equal(file_hash(data)))


def any_chunk_will_do(patch: Patch) -> None:
    async def believe(_part: object) -> None:
        pass

    patch.setattr(VerifyingSink, "commit", lambda sink: sink._keep())
    patch.setattr(fetcher, "require_state", believe)


class _Equal(bytes):
    """A hash that equals every other."""

    def __eq__(self, _other: object) -> bool:
        return True

    def __ne__(self, _other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


def no_beacon(patch: Patch) -> None:
    honest = economy.ticket_seed
    patch.setattr(
        economy, "ticket_seed", lambda run, _beacon, *rest: honest(run, keccak(b""), *rest)
    )


def a_cap_that_grows_less_than_stake(patch: Patch) -> None:
    linear = economy._in_flight
    patch.setattr(economy, "_in_flight", lambda *terms: math.isqrt(linear(*terms)))


def friends_first(patch: Patch) -> None:
    """Let the coalition choose the validators, without re-audits."""
    patch.setattr(
        judges,
        "_order",
        lambda bench, _random: sorted(bench.all, key=lambda v: v not in bench.bought),
    )
    patch.setattr(judges, "is_reaudited", lambda _seed: False)
    patch.setattr(judges, "SHARES", (0.4,))


def no_limits_and_no_history(patch: Patch) -> None:
    no_statistics(patch)
    patch.setattr(WorkerHistory, "alarms", lambda *_: False)
    patch.setattr(economy, "PATIENCE_SUBMISSIONS", 2)


def no_history(patch: Patch) -> None:
    patch.setattr(drifting, "check_history", nothing)
    patch.setattr(drifting, "WINDOW", 3)


def any_fingerprint_will_do(patch: Patch) -> None:
    patch.setattr(judges, "is_checked", lambda *_: True)


def no_rewinding(patch: Patch) -> None:
    def forward_only(view: Any, poll: Any) -> bool:
        for event in poll.events:
            view.apply(event)
        return bool(poll.events)

    patch.setattr(reorg, "apply_poll", forward_only)


DEFENCES = {
    "check 1, signature": ("A39", no_signatures),
    "check 1, ticket": ("A13", without(checks, "_check_ticket")),
    "check 1, ticket of another": ("A10", without(checks, "_check_ticket")),
    "check 1, slot": ("A9", no_slots),
    "check 1, time": ("A33", without(checks, "_check_ticket")),
    "check 2, proofs": ("A7", without(checks, "_check_row")),
    "check 2, lengths": ("A35", without(judging, "check_form")),
    "check 3, problems": ("A12", without(judging, "check_assignment")),
    "check 3, groups": ("A21", without(judging, "check_assignment")),
    "check 4, grades": ("A16", without(judging, "check_grades")),
    "check 4, verifiers": ("A17", any_text_is_right),
    "check 5, endings": ("A18", without(judging, "check_endings")),
    "checks 6 and 7, another model": ("A1", no_statistics),
    "check 6, forged proofs": ("A6", without(judging, "check_proofs")),
    "check 7, all of a worker's work": ("A15", no_history),
    "check 7, best of many": ("A14", without(judging, "check_sampling")),
    "check 7, hidden bits": ("A38", without(judging, "check_sampling")),
    "proofs of checking": ("A24", any_fingerprint_will_do),
    "the draw of judges": ("A25", friends_first),
    "judges unforeseen": ("A31", friends_first),
    "beacons": ("A13", no_beacon),
    "caps linear in stake": ("A23", a_cap_that_grows_less_than_stake),
    "limits and history": ("A37", no_limits_and_no_history),
    "nonces": ("A29", no_memory_of_nonces),
    "files by their hash": ("A33", any_file_will_do),
    "policies by their hash": ("A34", any_chunk_will_do),
    "rewinding": ("A30", no_rewinding),
}
"""Each defence's attack, which must succeed without it, and the function that removes it."""


@pytest.mark.parametrize("defence", list(DEFENCES))
def test_suite_fails_without(stage: Stage, monkeypatch: pytest.MonkeyPatch, defence: str) -> None:
    name, take_out = DEFENCES[defence]
    attack = quick(ATTACKS[name])
    take_out(monkeypatch)
    (result,) = run(stage, [attack], trials=TRIALS)
    assert failures([result]), f"{name} is not noticed without {defence}"


def quick(attack: Attack) -> Attack:
    """Return an attack with its most profitable variants, without those of forge and networks."""
    variants = [v for v in attack.variants if v.many is None]
    if attack.id == "A25":
        variants = variants[-1:]  # a tenth of few validators may be no validator at all
    if attack.id == "A15":
        variants = list(drifting.VARIANTS)
    return replace(attack, variants=tuple(variants))


@pytest.mark.parametrize("name", ["A11", "A26", "A27", "A28", "A32"])
def test_a_fuzz_test_that_fails_breaks_its_attack(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """contracts/script/mutate.py measures which mutants of the contracts the fuzz tests kill; this
    test is about the use of forge's answer.
    """

    def answer(_number: int, runs: int) -> dict[str, tuple[bool, int]]:
        first, *others = contracts.FUZZED[name]
        return {first: (False, runs)} | dict.fromkeys(others, (True, runs))

    monkeypatch.setattr(contracts, "_forge", answer)
    (result,) = run(stage, [ATTACKS[name]])
    assert failures([result])
