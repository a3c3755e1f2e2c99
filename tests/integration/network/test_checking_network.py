"""Validators that do not check, among those that do, on a real chain: who is found out, and how.

The verdicts are right here (the worker is honest), so nobody loses stake: what gives them away is
that they have no hidden states to show fingerprints of.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from client_network import VALIDATORS, Network, eventually, open_network, running
from worlds.false_validators import Copier, Lazy

from muster.api import OrchestratorApi
from muster.api.answers import CheckReportAnswer, Watched
from muster.client.validator.loop import ValidatorLoop
from muster.protocol.ids import Address

HONEST, WATCHED = (wallet.address for wallet in VALIDATORS)


@asynccontextmanager
async def two_validators(
    folder: Path, second: type[ValidatorLoop]
) -> AsyncIterator[tuple[Network, OrchestratorApi]]:
    async with open_network(folder) as network:
        mains = (network.worker(0), network.validator(0), network.validator(1, second))
        async with running(*mains), OrchestratorApi(network.orchestrator) as api:
            yield network, api


async def watched(api: OrchestratorApi, validator: Address) -> Watched:
    """Return the summary about a validator once somebody has compared its fingerprints."""
    found: list[Watched] = []

    async def is_compared() -> bool:
        found[:] = [
            each for each in (await api.watched()).validators if each.validator == validator
        ]
        return found[0].compared > 0

    await eventually(is_compared)
    return found[0]


async def test_two_that_check_bear_each_other_out(tmp_path: Path) -> None:
    async with two_validators(tmp_path, ValidatorLoop) as (_, api):
        both = [await watched(api, who) for who in (HONEST, WATCHED)]
    assert [(each.failed, each.is_suspect) for each in both] == [(0, False)] * 2
    assert all(each.proven >= 1 for each in both)


@pytest.mark.parametrize("kind", [Lazy, Copier])
async def test_who_does_not_check_is_found_at_the_first_batch(
    tmp_path: Path, kind: type[ValidatorLoop]
) -> None:
    Copier.folder, Copier.other = tmp_path / "validator-0", HONEST
    async with two_validators(tmp_path, kind) as (network, api):
        about = await watched(api, WATCHED)
        assert about.failed == about.compared
        assert about.is_suspect
        view = await network.view()
        first = min(b.batch_id for b in view.batches.values() if b.records is not None)
        await says_who_found_it(api, first)
        assert not view.slashes


async def says_who_found_it(api: OrchestratorApi, batch_id: int) -> None:
    found: list[CheckReportAnswer] = []

    async def is_reported() -> bool:
        reports = (await api.checking(batch_id)).reports
        found[:] = [each for each in reports if each.validator == WATCHED]
        return bool(found)

    # A later batch may have been compared before it.
    await eventually(is_reported)
    [report] = found
    assert report.reporter == HONEST
    assert report.failed == report.compared > 0
