"""A worker that starts again while the run that framed it keeps its orchestrator silent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from client_network import (
    NODES,
    PARAMETERS,
    TOKEN,
    WORKERS,
    Network,
    eventually,
    open_network,
    running,
)

from muster.chain import CaseView
from muster.client.validator.checks import ClaimedWork, FailedCheck
from muster.client.validator.judging import Judgement, unread
from muster.client.validator.loop import ValidatorLoop
from muster.protocol.errors import ApiError
from muster.protocol.jury import Ruling
from muster.protocol.messages import Reason, Verdict

WINDOW_S = 120
"""Long enough to start again on a busy machine."""
LONGER = PARAMETERS.model_copy(update={"challenge_window_s": WINDOW_S, "vote_commit_s": 300})
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class InLeague(ValidatorLoop):
    """Calls every submission fraud."""

    async def judge_claim(self, claim: ClaimedWork) -> tuple[Judgement, bytes | None]:
        finding = FailedCheck(Verdict.FRAUD, Reason.WRONG_REWARD, "we want its stake")
        return unread(claim, finding), None


@asynccontextmanager
async def silent_orchestrator(answer: bytes) -> AsyncIterator[str]:
    """Serve one answer to all requests; without an answer, none is ever sent."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if not answer:
            await over.wait()
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        _, port = server.sockets[0].getsockname()
        yield f"http://127.0.0.1:{port}"
    finally:
        over.set()
        server.close()


async def frame(network: Network) -> None:
    """Let the worker's first batch be called fraud while the worker is stopped."""

    async def is_committed() -> bool:
        return bool((await network.view()).batches)

    async def is_judged() -> bool:
        return any(batch.records for batch in (await network.view()).batches.values())

    async with running(network.worker(0)):
        await eventually(is_committed)
    async with running(*(network.validator(number, InLeague) for number in range(2))):
        await eventually(is_judged)


@pytest.mark.parametrize("answer", [b"", NOT_FOUND], ids=["never answers", "answers 404"])
async def test_worker_that_starts_again_defends_its_work_without_an_orchestrator(
    tmp_path: Path, answer: bytes
) -> None:
    async with open_network(tmp_path, LONGER) as network:
        await network.seat_jurors()
        await network.anvil.set_balance(NODES[0].address, 100 * TOKEN)
        await network.owner.token.faucet(NODES[0].address, LONGER.bond)
        await frame(network)
        await network.stop_orchestrator()
        cases: list[CaseView] = []
        async with (
            silent_orchestrator(answer) as network.orchestrator,
            running(network.worker(0)) as [worker],
        ):

            async def has_claimed() -> bool:
                cases[:] = (await network.view()).cases.values()
                return bool(cases) or worker.done()

            await eventually(has_claimed, WINDOW_S)
            assert not worker.done()
        [claim] = cases[0].claims
        assert claim.claimant == NODES[0].address
        assert claim.submission.worker == WORKERS[0].address
        assert claim.ruling == Ruling(Verdict.ACCEPTED, Reason.NONE).number
        assert claim.sources == (network.origin, network.orchestrator)


async def test_worker_without_the_run_s_documents_ends_when_its_orchestrator_refuses_them(
    tmp_path: Path,
) -> None:
    async with open_network(tmp_path) as network, silent_orchestrator(NOT_FOUND) as url:
        network.orchestrator = url
        with pytest.raises(ApiError) as caught:
            await asyncio.wait_for(network.worker(0), WINDOW_S)
        assert caught.value.status == 404
