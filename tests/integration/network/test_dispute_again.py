"""`muster dispute open` once more, after a relay refused the file or the command was killed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from chain_scenario import CHALLENGER, HONEST, PARAMETERS, Scenario, fraud, network
from click.testing import CliRunner, Result

from muster.app.cli import muster
from muster.chain import save_deployment
from muster.client.chain_facts import entry_of
from muster.client.cli.printing import SENT
from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.errors import NotYet
from muster.protocol.messages import Submission
from muster.wallet import save_wallet

FILE = b"rollouts"


class Room:
    """An orchestrator and a relay's room in one; the room refuses files until it is open."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.is_open = False
        self.taken: list[str] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "PUT":
            await request.read()
            if not self.is_open:
                return web.Response(status=503)
            self.taken.append(request.path)
            return web.Response(status=201)
        found = self.answers.get(request.path)
        return web.Response(status=404) if found is None else web.Response(body=found)

    async def show(self, net: Scenario, submission: Submission, batch_id: int) -> None:
        entry = entry_of(await net.work(submission, HONEST), await net.of(CHALLENGER).now())
        leaf, shown = hex0x(submission.leaf()), json.loads(entry.model_dump_json())
        batch = {"batch_id": batch_id, "root": leaf, "count": 1, "submissions": [shown]}
        self.answers[f"/v1/work/{leaf}"] = json.dumps(shown).encode()
        self.answers[f"/v1/batches/{batch_id}"] = json.dumps(batch).encode()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Room]:
    room, app = Room(), web.Application()
    app.router.add_route("*", "/{path:.*}", room.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    room.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield room
    finally:
        await runner.cleanup()


async def open_dispute(net: Scenario, folder: Path, *words: str) -> Result:
    keystore, flags = str(folder / "challenger.json"), ["--rpc", net.anvil.rpc_url]
    flags += ["--deployments", str(folder), "--keystore", keystore, "--yes", "--json"]
    return await asyncio.to_thread(
        CliRunner().invoke,
        muster,
        ["dispute", "open", *words, *flags],
        env={"MUSTER_PASSWORD": "secret"},
    )


async def test_command_that_is_repeated_pays_one_bond_and_uploads_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.client.cli.dispute.ROOM_PAUSE_S", 0.0)
    SENT.clear()  # commands of other tests ran in this process
    async with network() as net, serving() as room:
        save_deployment(tmp_path, net.deployment)
        save_wallet(tmp_path / "challenger.json", CHALLENGER.key, "secret", light=True)
        (tmp_path / "file").write_bytes(FILE)
        token = net.of(CHALLENGER).token
        await token.faucet(CHALLENGER.address, 3 * PARAMETERS.bond)
        submission = replace(net.submission(HONEST, 0), file_hash=file_hash(FILE))
        batch_id = await net.judge(submission, fraud(1, submission))
        await room.show(net, submission, batch_id)
        words = [f"{batch_id}:0", "--orchestrator", room.url, "--relay", room.url]
        words += ["--file", str(tmp_path / "file")]

        first = await open_dispute(net, tmp_path, *words)
        assert isinstance(first.exception, NotYet), first.output
        assert "it pays no second bond" in str(first.exception.hint)
        assert "sent 0x" in first.stderr
        assert not SENT  # so the command ends with the code of its error
        room.is_open = True
        again = await open_dispute(net, tmp_path, *words)

        assert again.exit_code == 0, again.output
        assert "no second bond is paid" in again.stderr
        assert json.loads(again.stdout) == json.loads(first.stdout)
        assert f"/v1/files/{hex0x(submission.file_hash)}" in room.taken
        [case] = (await net.view()).cases.values()
        assert [claim.claimant for claim in case.claims] == [CHALLENGER.address]
        assert await token.balance_of(CHALLENGER.address) == 2 * PARAMETERS.bond

        other = await open_dispute(net, tmp_path, *words, "--ruling", "incomplete")
        assert other.exit_code == 0, other.output
        assert await token.balance_of(CHALLENGER.address) == PARAMETERS.bond
