"""`muster join` on a real chain: an orchestrator's answer, and a stranger's."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from click.testing import CliRunner
from orchestrator_network import NODES, ORCHESTRATOR, Network, open_network, running

from muster.api.network_document import NetworkPage, sign_network
from muster.app.cli import muster
from muster.chain import load_deployment
from muster.client.settings import NodeSettings
from muster.protocol.errors import ApiError, ConfigError, MusterError, WrongChain
from muster.settings import load_settings
from muster.settings.profiles import read_profiles, resolve, write_profiles

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Network]:
    async with open_network(tmp_path_factory.mktemp("network")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without networks."""
    for name in ("MUSTER_RPC", "MUSTER_DEPLOYMENTS", "MUSTER_NETWORK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "muster"


async def call(*words: str, answer: str | None = None) -> Any:
    """Run a command in a thread of its own and return its result."""
    return await asyncio.to_thread(CliRunner().invoke, muster, list(words), input=answer)


def page_of(network: Network, **changes: Any) -> NetworkPage:
    """Return an honest orchestrator's document with changes."""
    deployment = network.deployment
    honest: dict[str, Any] = {
        "run_id": network.run_id,
        "chain_id": deployment.chain_id,
        "deploy_block": deployment.deploy_block,
        "contracts": dict(deployment.contracts),
        "rpc": (network.anvil.rpc_url,),
    }
    # As a stranger may send it: nothing is validated.
    return NetworkPage.model_construct(**{"orchestrator": "", "relays": (), **honest, **changes})


Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def stranger(handler: Handler) -> AsyncIterator[str]:
    """Serve a stranger's answer to every request; yields the URL."""
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def serving(network: Network, page: NetworkPage, key: bytes = ORCHESTRATOR) -> Handler:
    signed = sign_network(page, network.chain.domain("ContributionLedger"), key)

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(signed.model_dump(mode="json"))

    return answer


def saying(body: dict[str, str]) -> Handler:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body)

    return answer


async def test_an_orchestrator_tells_where_its_network_is(network: Network, home: Path) -> None:
    relay = "http://127.0.0.1:8700"
    public = {"public_rpc": (network.anvil.rpc_url,), "relays": (relay,)}
    async with running(network, **public) as url:
        joined = await call("join", url, "--name", "here", "--yes", "--json")
        assert joined.exit_code == 0, joined.output
        shown = json.loads(joined.stdout)
        assert (shown["run"], shown["orchestrator"]) == (network.run_id, url)
        first, keys, money, stake, work = shown["next"]
        assert first == f"muster doctor --run {network.run_id}"
        assert [line.split()[1] for line in (keys, stake, work)] == ["init", "stake", "worker"]
        assert "says which tokens and coins to send" in money
        place, rpc, deployments = resolve(None, None)
        assert rpc == network.anvil.rpc_url
        assert load_deployment(deployments, 31337).contracts == network.deployment.contracts
        assert place.served(network.run_id).orchestrator == url
        assert shown["relays"] == [relay]
        assert place.served(network.run_id).relays == ()
        listed = await call("run", "list", "--json")
        assert [run["run"] for run in json.loads(listed.stdout)] == [network.run_id]
        again = await call("join", url, "--yes")
        assert again.exit_code == 0, again.output
        assert list(read_profiles().networks) == ["here"]
    removed = await call("network", "remove", "here")
    assert removed.exit_code == 0
    assert not list((home / "networks").iterdir())


async def test_nothing_is_written_before_the_question_is_answered(
    network: Network, home: Path
) -> None:
    async with stranger(serving(network, page_of(network))) as url:
        asked = await call("join", url, answer="n\n")
    assert asked.exit_code == 1
    assert network.deployment.contracts["StakeVault"] in asked.output
    assert not home.exists()


async def refused(url: str, *flags: str) -> MusterError:
    """Return why `join` refuses, having written nothing new."""
    before = read_profiles()
    result = await call("join", url, "--yes", *flags)
    assert isinstance(result.exception, MusterError), result.output
    assert result.exception.hint
    assert read_profiles() == before
    return result.exception


async def test_who_is_not_the_runs_orchestrator_is_refused(network: Network) -> None:
    async with stranger(serving(network, page_of(network), NODES[0])) as url:
        error = await refused(url)
    assert "signed, the orchestrator of run" in str(error)


async def test_a_document_that_was_changed_is_refused(network: Network) -> None:
    honest, other = (
        sign_network(page, network.chain.domain("ContributionLedger"), ORCHESTRATOR)
        for page in (page_of(network), page_of(network, relays=("https://relay.example.org",)))
    )

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({**honest.model_dump(mode="json"), "document": other.document})

    async with stranger(answer) as url:
        assert "signed, the orchestrator of run" in str(await refused(url))


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"run_id": 99}, ConfigError, "has no run 99"),
        ({"chain_id": 1}, WrongChain, "serves chain 31337, the contracts are on 1"),
        ({"contracts": {}}, ConfigError, "it lacks"),
        ({"contracts": {"StakeVault": "0x12"}}, ConfigError, "contracts are malformed"),
        ({"rpc": ()}, ConfigError, "names no RPC endpoint"),
        ({"rpc": ("/run/node.ipc",)}, ApiError, "is no URL"),
        ({"rpc": ("file:///etc/passwd",)}, ApiError, "is no URL"),
        ({"relays": ("http://a:b@relay",)}, ApiError, "holds a name or a password"),
        ({"orchestrator": "http://host/\x1b[2J"}, ApiError, "characters that a URL cannot have"),
        ({"rpc": ("http://one,http://two",)}, ApiError, "characters that a URL cannot have"),
        ({"relays": ("https://r",) * 65}, ApiError, "at most 64"),
        ({"name": "devnet"}, ApiError, "Extra inputs"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    network: Network, changes: dict[str, Any], kind: type[MusterError], said: str
) -> None:
    page = page_of(network, **changes)
    if "name" in changes:  # a field that the document does not have
        text = json.dumps({**page_of(network).model_dump(mode="json"), **changes})
        body = {"document": text, "signature": "0x" + "7f" * 64 + "1b"}
        async with stranger(saying(body)) as url:
            error = await refused(url)
    else:
        async with stranger(serving(network, page)) as url:
            error = await refused(url)
    assert isinstance(error, kind)
    assert said in str(error)


async def test_contracts_without_code_are_refused(network: Network) -> None:
    moved = {**network.deployment.contracts, "StakeVault": "0x" + "11" * 20}
    async with stranger(serving(network, page_of(network, contracts=moved))) as url:
        error = await refused(url)
    assert isinstance(error, WrongChain)
    assert "no code at the recorded address of StakeVault" in str(error)


async def test_a_redirect_is_not_followed(network: Network) -> None:
    asked: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPFound("/internal")

    async with stranger(elsewhere) as url:
        error = await refused(url)
    assert asked == ["/v1/network"]
    assert "answered 302" in str(error)


async def test_an_answer_without_end_is_cut_off(network: Network) -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 4096)

    async with stranger(flood) as url:
        assert "exceeds 65536 bytes" in str(await refused(url))


async def test_what_is_no_orchestrator_is_one_error(network: Network) -> None:
    assert "is no URL of http, https" in str(await refused("orchestrator.example.org"))
    assert "no answer from the orchestrator" in str(await refused("http://127.0.0.1:1"))
    async with stranger(saying({"hello": "world"})) as url:
        assert "SignedNetwork.document" in str(await refused(url))
    assert "JSON-RPC" not in str(await refused(network.anvil.rpc_url))


async def test_a_profile_that_is_there_is_not_changed(network: Network) -> None:
    async with stranger(serving(network, page_of(network))) as url:
        assert (await call("join", url, "--name", "here", "--yes")).exit_code == 0
        known = read_profiles()
        here = known.networks["here"]
        write_profiles(
            known.model_copy(
                update={
                    "networks": {"here": here, "other": here.model_copy(update={"chain_id": 5})}
                }
            )
        )
        assert "has another chain" in str(await refused(url, "--name", "other"))
    moved = page_of(network, orchestrator="http://127.0.0.1:1")
    async with stranger(serving(network, moved)) as url:
        error = await refused(url)
    assert f"has run {network.run_id} at http://127.0.0.1:" in str(error)


async def test_relays_stay_those_that_the_orchestrator_names(network: Network) -> None:
    pages = [page_of(network, relays=(f"http://127.0.0.1:{port}",)) for port in (8700, 8701)]
    serve = serving(network, pages[0])

    async def answer(request: web.Request) -> web.Response:
        return await serve(request)

    async with stranger(answer) as url:
        assert (await call("join", url, "--name", "here", "--yes")).exit_code == 0
        flags = {"run": network.run_id, "state_dir": "state"}
        settings = load_settings(NodeSettings, env_prefix="X_", flags=flags, environ=os.environ)
        assert (settings.orchestrator, settings.relay) == (url, ())
        serve = serving(network, pages[1])
        again = await call("join", url, "--yes", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["relays"] == ["http://127.0.0.1:8701"]


async def test_relays_of_ones_own_stay_when_a_run_is_joined(network: Network) -> None:
    where = ("--rpc", network.anvil.rpc_url, "--deployments", str(network.folder / "deployments"))
    run, mine = str(network.run_id), "http://127.0.0.1:8800"
    async with stranger(serving(network, page_of(network, relays=("http://other",)))) as url:
        own = ("--run", run, "--orchestrator", url, "--relay", mine)
        assert (await call("network", "add", "near", *where, *own)).exit_code == 0
        joined = await call("join", url, "--yes")
        assert joined.exit_code == 0, joined.output
    assert read_profiles().networks["near"].runs[run].relays == (mine,)


async def test_an_endpoint_of_ones_own_takes_the_place_of_theirs(network: Network) -> None:
    page = page_of(network, rpc=("http://127.0.0.1:1",))
    async with stranger(serving(network, page)) as url:
        assert "does not answer" in str(await refused(url))
        own = await call("join", url, "--rpc", network.anvil.rpc_url, "--yes")
        assert own.exit_code == 0, own.output
    assert resolve(None, None)[1] == network.anvil.rpc_url


async def test_a_known_network_is_asked_at_its_own_endpoint(network: Network) -> None:
    page = page_of(network, rpc=("http://127.0.0.1:1",))
    where = ("--rpc", network.anvil.rpc_url, "--deployments", str(network.folder / "deployments"))
    async with stranger(serving(network, page)) as url:
        assert "does not answer" in str(await refused(url))
        assert (await call("network", "add", "near", *where)).exit_code == 0
        joined = await call("join", url, "--yes", "--json")
        assert joined.exit_code == 0, joined.output
    shown = json.loads(joined.stdout)
    assert (shown["network"], shown["named by"]) == ("near", "your network near")
    invented = page_of(network, run_id=99, rpc=("http://127.0.0.1:1",))
    async with stranger(serving(network, invented)) as url:
        assert "has no run 99" in str(await refused(url))
    other = {**network.deployment.contracts, "StakeVault": "0x" + "11" * 20}
    async with stranger(serving(network, page_of(network, contracts=other, rpc=page.rpc))) as url:
        assert "does not answer" in str(await refused(url))


async def test_a_network_gets_a_name_once_its_endpoint_was_asked(
    network: Network, home: Path
) -> None:
    folder = str(network.folder / "deployments")
    where = ("--rpc", network.anvil.rpc_url, "--deployments", folder)
    nowhere = await call("network", "add", "far", "--rpc", "http://127.0.0.1:1")
    assert isinstance(nowhere.exception, MusterError)
    assert not home.exists()
    for name in ("near", "second"):
        assert (await call("network", "add", name, *where)).exit_code == 0
    again = await call("network", "add", "near", *where)
    assert "there is a network 'near' already" in str(again.exception)
    assert read_profiles().current == "near"
    assert (await call("network", "use", "second")).exit_code == 0
    assert json.loads((await call("network", "show", "--json")).stdout)["network"] == "second"
    listed = await call("network", "list")
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [
        ["near", "31337"],
        ["*", "second"],
    ]
    runs = await call("run", "list", "--network", "near", "--json")
    assert len(json.loads(runs.stdout)) == 1
    assert (await call("network", "remove", "second")).exit_code == 0
    assert read_profiles().current is None
    assert Path(folder, "31337.json").exists()
    assert "no network is called" in str((await call("network", "use", "second")).exception)
