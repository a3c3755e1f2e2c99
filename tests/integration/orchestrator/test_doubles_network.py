"""A double signer loses its stake on a real chain: the orchestrator shows both signatures."""

from dataclasses import replace
from pathlib import Path

import pytest
from orchestrator_network import NODES, VALIDATORS, WORKERS, eventually, open_network, running

from muster.chain import WorkerStatus
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import file_hash
from muster.protocol.errors import ApiError
from muster.protocol.messages import Reason, Verdict


async def test_validator_with_two_opinions_loses_its_stake_and_its_seat(tmp_path: Path) -> None:
    async with open_network(tmp_path, validators=3) as network, running(network) as url:
        submission = await network.upload(url, 0, b"rows")
        await network.judge(url, submission, validators=(0,))
        with pytest.raises(ApiError, match="signed other outcomes"):
            await network.judge(url, submission, Verdict.REJECTED, Reason.SCHEMA, validators=(0,))
        twice, honest = (address_of(key) for key in VALIDATORS[:2])

        async def is_unseated() -> bool:
            return not await network.chain.runs.is_validator(network.run_id, twice)

        await eventually(is_unseated)
        vault = network.chain.vault
        assert await vault.active_stake(network.run_id, twice) == 0
        await network.judge(url, submission, validators=(1, 2))
        await network.until(url, submission, "judged")
        assert await vault.active_stake(network.run_id, honest) > 0


async def test_worker_with_two_submissions_for_a_slot_is_banned(tmp_path: Path) -> None:
    async with open_network(tmp_path) as network, running(network) as url:
        honest = await network.upload(url, 1, b"honest rows")
        first = await network.upload(url, 0, b"rows")
        second = replace(first, file_hash=file_hash(b"other rows"))
        async with network.api(url, NODES[0]) as api:
            signature = network.sign(second.struct_hash(), NODES[0])
            with pytest.raises(ApiError, match="already has another submission"):
                await api.submit(second, signature, b"other rows")
        for submission in (honest, first):
            await network.judge(url, submission)
            await network.until(url, submission, "judged")

        async def is_banned() -> bool:
            return await status_of(0) is WorkerStatus.BANNED

        async def status_of(number: int) -> WorkerStatus:
            address = address_of(WORKERS[number])
            return (await network.chain.workers.member_of(network.run_id, address)).status

        await eventually(is_banned)
        assert await status_of(1) is WorkerStatus.ACTIVE
