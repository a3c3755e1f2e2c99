"""One chain over HTTP, a WebSocket and a Unix socket: the same answers."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from web3.middleware import Web3Middleware

from muster.app.anvil import Anvil
from muster.chain.rpc import Rpc
from muster.protocol.errors import ChainUnreachable, ConfigError, RpcError

TRANSPORTS = ("http", "ws", "ipc")


@pytest.fixture
async def anvil(tmp_path: Path) -> AsyncIterator[Anvil]:
    async with Anvil(block_time_s=Anvil.STILL_S, arguments=("--ipc", str(tmp_path / "ipc"))) as it:
        yield it


@pytest.fixture(params=TRANSPORTS)
def url(anvil: Anvil, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    urls = {
        "http": anvil.rpc_url,
        "ws": anvil.rpc_url.replace("http", "ws"),
        "ipc": str(tmp_path / "ipc"),
    }
    return urls[request.param]


async def test_calls_and_batches_are_answered(url: str) -> None:
    async with Rpc(url) as rpc:
        assert await rpc.call("eth_chainId") == "0x7a69"
        calls: list[tuple[str, list[Any]]] = [
            ("eth_getBlockByNumber", [hex(n), False]) for n in range(2)
        ]
        genesis, missing = await rpc.batch(calls)
        assert (genesis["number"], missing) == ("0x0", None)


async def test_error_of_one_call_stands_in_its_place(url: str) -> None:
    async with Rpc(url) as rpc:
        with pytest.raises(RpcError, match="eth_nonsense failed"):
            await rpc.call("eth_nonsense")
        first, second = await rpc.try_batch([("eth_nonsense", []), ("eth_chainId", [])])
        assert (type(first), second) == (RpcError, "0x7a69")


async def test_many_at_once_get_their_own_answers(url: str) -> None:
    async with Rpc(url) as rpc:
        accounts = await rpc.call("eth_accounts")
        asked = [accounts[i % len(accounts)] for i in range(100)]
        await asyncio.gather(
            *(
                rpc.call("anvil_setBalance", account, hex(i + 1))
                for i, account in enumerate(accounts)
            )
        )
        found = await asyncio.gather(*(rpc.call("eth_getBalance", a, "latest") for a in asked))
        assert [int(wei, 16) for wei in found] == [accounts.index(a) + 1 for a in asked]


async def test_closed_endpoint_can_be_used_again(url: str) -> None:
    rpc = Rpc(url)
    for _ in range(2):
        assert await rpc.call("eth_chainId") == "0x7a69"
        await rpc.close()


async def test_waiting_for_an_answer_takes_no_processor(anvil: Anvil) -> None:
    """web3's own waiting for an answer over a socket keeps a core busy."""

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await slow_copy(reader, writer, anvil, 0.5)

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Rpc(f"ws://127.0.0.1:{port}") as rpc:
        await rpc.call("eth_chainId")
        began = time.thread_time()
        await rpc.call("eth_chainId")
        assert time.thread_time() - began < 0.2


async def slow_copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, anvil: Anvil, delay_s: float
) -> None:
    """Pass bytes on to Anvil, and its answers back after a while."""
    host, port = anvil.rpc_url.removeprefix("http://").split(":")
    upstream, to_upstream = await asyncio.open_connection(host, int(port))

    async def copy(
        source: asyncio.StreamReader, sink: asyncio.StreamWriter, pause_s: float
    ) -> None:
        while data := await source.read(1 << 16):
            await asyncio.sleep(pause_s)
            sink.write(data)
            await sink.drain()
        sink.close()

    await asyncio.gather(copy(reader, to_upstream, 0), copy(upstream, writer, delay_s))


@pytest.mark.parametrize("transport", ["ws", "ipc"])
async def test_lost_connection_is_told_and_opened_again(transport: str, tmp_path: Path) -> None:
    socket = tmp_path / "ipc"
    options: dict[str, Any] = {"block_time_s": Anvil.STILL_S, "arguments": ("--ipc", str(socket))}
    async with Anvil(**options) as anvil:
        port = int(anvil.rpc_url.rpartition(":")[2])
        url = f"ws://127.0.0.1:{port}" if transport == "ws" else str(socket)
        rpc = Rpc(url)
        assert await rpc.call("eth_chainId") == "0x7a69"
    with pytest.raises(ChainUnreachable, match=r"does not answer: \w+$"):
        await rpc.call("eth_chainId")
    async with Anvil(port=port, **options):
        assert await rpc.call("eth_chainId") == "0x7a69"
        await rpc.close()


async def test_requests_under_way_fail_with_their_connection(tmp_path: Path) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            await reader.readline()
        writer.close()

    server = await asyncio.start_unix_server(swallow, tmp_path / "socket")
    async with server:
        rpc = Rpc(str(tmp_path / "socket"), timeout_s=0.5)
        calls = [rpc.call("eth_chainId") for _ in range(3)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, ChainUnreachable) for outcome in outcomes), outcomes


@pytest.mark.parametrize("transport", ["ws", "ipc"])
async def test_node_tells_of_blocks(anvil: Anvil, tmp_path: Path, transport: str) -> None:
    url = anvil.rpc_url.replace("http", "ws") if transport == "ws" else str(tmp_path / "ipc")
    async with Rpc(url) as rpc, Rpc(anvil.rpc_url) as other:
        waiting = asyncio.create_task(rpc.next_block())
        # The subscription stands once a later request is answered.
        while await other.call("eth_blockNumber") == "0x0":
            await rpc.call("eth_chainId")
            assert not waiting.done()
            await other.call("evm_mine")
        await waiting
        # A block that is announced between two waits ends the second wait at once.
        await other.call("evm_mine")
        await rpc.next_block()
        waiting = asyncio.create_task(rpc.next_block())
        await rpc.call("eth_chainId")
        assert not waiting.done()
        await other.call("evm_mine")
        await waiting


async def test_endpoint_over_http_is_not_waited_for(anvil: Anvil) -> None:
    async with Rpc(anvil.rpc_url) as rpc:
        await asyncio.wait_for(rpc.next_block(), 1)


@pytest.mark.parametrize("transport", ["ws", "ipc"])
async def test_wait_for_a_block_ends_with_the_connection(transport: str, tmp_path: Path) -> None:
    socket = tmp_path / "ipc"
    options: dict[str, Any] = {"block_time_s": Anvil.STILL_S, "arguments": ("--ipc", str(socket))}
    async with Anvil(**options) as anvil:
        url = anvil.rpc_url.replace("http", "ws") if transport == "ws" else str(socket)
        async with asyncio.timeout(180):
            while transport == "ipc" and not socket.is_socket():
                await asyncio.sleep(0.01)
        rpc = Rpc(url)
        waiting = asyncio.create_task(rpc.next_block())
        await rpc.call("eth_chainId")
    await asyncio.wait_for(waiting, 180)
    # Nor does it wait where nothing answers.
    await asyncio.wait_for(rpc.next_block(), 180)
    await rpc.close()


@pytest.mark.parametrize("url", ["ftp://host", "nowhere", "/no/socket", "host:port"])
def test_what_is_no_endpoint_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="is no RPC endpoint"):
        Rpc(url)


@pytest.mark.parametrize("url", ["127.0.0.1:8545", "localhost:8545", "rpc.example.org:443"])
def test_an_endpoint_without_its_scheme_is_told_what_to_write(url: str) -> None:
    with pytest.raises(ConfigError, match="lacks its scheme") as raised:
        Rpc(url)
    assert raised.value.hint == f"write http://{url}"


class Counting(Web3Middleware):
    """Counts the requests that pass."""

    seen: list[str]

    async def async_request_processor(self, method: Any, params: Any) -> Any:
        self.seen.append(method)
        return method, params


def counting(seen: list[str]) -> Callable[[Any], Web3Middleware]:
    def build(w3: Any) -> Web3Middleware:
        middleware = Counting(w3)
        middleware.seen = seen
        return middleware

    return build


async def test_added_middleware_sees_every_request(url: str) -> None:
    seen: list[str] = []
    async with Rpc(url) as rpc:
        # web3 takes any function that builds a provider, although its annotation says otherwise.
        rpc.w3.middleware_onion.add(counting(seen), "counting")  # type: ignore[arg-type]
        await rpc.call("eth_chainId")
        await rpc.batch([("eth_blockNumber", []), ("eth_chainId", [])])
        assert seen == ["eth_chainId", "eth_blockNumber", "eth_chainId"]
        rpc.w3.middleware_onion.remove("counting")
        assert await rpc.call("eth_chainId") == "0x7a69"
        assert len(seen) == 3


async def test_w3_answers_as_its_users_expect(anvil: Anvil) -> None:
    async with Rpc(anvil.rpc_url) as rpc:
        block = await rpc.w3.eth.get_block("latest")
        assert (block.number, await rpc.w3.eth.chain_id) == (0, 31337)  # type: ignore[attr-defined]


async def test_urls_are_not_logged(anvil: Anvil, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with Rpc(anvil.rpc_url.replace("http://", "ws://") + "/?secret-key") as rpc:
        await rpc.call("eth_chainId")
    assert "secret-key" not in caplog.text
