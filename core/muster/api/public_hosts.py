"""Requests to hosts that strangers name: none reaches a private network.

A name may lead anywhere, and to another place the next time. So its addresses are looked up, all
must be public, and only an address that was checked is asked.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx

from muster.lifecycle import in_turn

KEPT_S = 60.0
"""Seconds for which addresses are kept, also those of a host that has none."""
_EMBEDS_IPV4 = ipaddress.ip_network("64:ff9b::/96")
_NEVER_PUBLIC = [
    ipaddress.ip_network(network)
    for network in ("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "fec0::/10")
]
"""IPv6 networks whose addresses the ipaddress module takes for public, but which embed an IPv4
address, or are of a site."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host and port; raises OSError when it has none."""


def _resolver(threads: ThreadPoolExecutor) -> Resolve:
    """Return the system's resolver; a name that hangs keeps its thread after the deadline."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                threads, partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            )
        except UnicodeError as error:
            raise OSError("no name that there could be") from error
        return [str(address[0]) for *_, address in found]

    return resolve


resolve = _resolver(ThreadPoolExecutor(16, thread_name_prefix="resolve"))
"""Finds the addresses of names that anybody may choose."""
resolve_for_orchestrator = _resolver(ThreadPoolExecutor(16, thread_name_prefix="resolve-named"))
"""Finds those of an orchestrator, and of what it names: strangers' names occupy none of its
threads."""


class PrivateNetwork(ConnectionError):
    """A stranger's URL leads into a private network."""


class PublicHosts:
    """Addresses of strangers' hosts, kept for a minute; all of a host's must be public.

    Callers connect to an address that was checked: a name may have others the next time.
    """

    def __init__(self, resolver: Resolve, patience_s: float) -> None:
        """`patience_s` limits a lookup, and the time to reach any of a host's addresses."""
        self._resolver, self.patience_s = resolver, patience_s
        self._found: dict[tuple[str, int], tuple[float, Sequence[str]]] = {}
        self._inside: dict[tuple[str, int], bool] = {}
        self._answered = set[tuple[str, int]]()

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """Return all addresses of a host; none when it has none, or none that are found in time."""
        now = asyncio.get_running_loop().time()
        self._found = {place: found for place, found in self._found.items() if found[0] > now}
        if (host, port) not in self._found:
            try:
                async with asyncio.timeout(self.patience_s):
                    found = await self._resolver(host, port)
            except OSError:  # also TimeoutError
                found = ()
            self._found[host, port] = now + KEPT_S, found
        return self._found[host, port][1]

    async def require_public(self, host: str, port: int) -> Sequence[str]:
        """Return a host's addresses, the one that was reached last before the others; raises
        PrivateNetwork or another ConnectionError.
        """
        found = await self.addresses(host, port)
        if not found:
            raise ConnectionError("its host has no address")
        if not all(map(is_public, found)):
            raise PrivateNetwork("it leads into a private network")
        return found

    def note_peer(self, url: httpx.URL, answer: httpx.Response) -> None:
        """Take in the address of a host of our own choice, which answered."""
        stream = answer.extensions.get("network_stream")
        peer = stream.get_extra_info("server_addr") if stream else None
        if peer:
            self._answered.add(_place(url))
            self._note_addresses(_place(url), [str(peer[0])])

    async def is_inside(self, url: httpx.URL) -> bool:
        """Return whether a host of our own choice is in a private network: by all addresses that
        answered, by lookups only before.

        One that was public once stays so: its owner chooses what each lookup finds, and would lead
        us into our network.
        """
        place = _place(url)
        if place not in self._answered:
            found = await self.addresses(*place)
            if not found:
                return False
            self._note_addresses(place, found)
        return self._inside[place]

    def _note_addresses(self, place: tuple[str, int], found: Sequence[str]) -> None:
        self._inside[place] = self._inside.get(place, True) and not any(map(is_public, found))

    def note_reached(self, host: str, port: int, address: str) -> None:
        """Put an address before the host's others, as long as they are kept."""
        if kept := self._found.get((host, port)):
            self._found[host, port] = kept[0], list(dict.fromkeys([address, *kept[1]]))


def _place(url: httpx.URL) -> tuple[str, int]:
    return url.host, url.port or 0


class PublicTransport(httpx.AsyncBaseTransport):
    """Sends requests to public addresses only."""

    def __init__(self, hosts: PublicHosts, inner: httpx.AsyncBaseTransport) -> None:
        self._hosts, self._inner = hosts, inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request to the first checked address of its host that is reached, with the name
        in the SNI.
        """
        host, port = request.url.raw_host.decode("ascii"), request.url.port or 0
        found = await self._hosts.require_public(host, port)
        refused: httpx.TransportError | None = None
        for address, share_s in in_turn(found, self._hosts.patience_s):
            timeout = {**request.extensions.get("timeout", {}), "connect": share_s}
            pinned = httpx.Request(
                request.method,
                request.url.copy_with(host=address),
                # A connection is not reused for another name at the same address.
                headers={**request.headers, "connection": "close"},
                stream=request.stream,
                extensions={**request.extensions, "sni_hostname": host, "timeout": timeout},
            )
            try:
                answer = await self._inner.handle_async_request(pinned)
            # Nothing was sent: another address may be asked.
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                refused = error
                continue
            self._hosts.note_reached(host, port, address)
            return answer
        raise refused or httpx.ConnectError("its host has no address")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


def is_public(text: str) -> bool:
    """Return whether an address is public, also if it embeds another address."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    read: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        read += [inner for inner in (address.ipv4_mapped, address.sixtofour) if inner]
        if any(address in network for network in _NEVER_PUBLIC):
            return False
        if address in _EMBEDS_IPV4:
            read.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return all(each.is_global and not each.is_multicast for each in read)
