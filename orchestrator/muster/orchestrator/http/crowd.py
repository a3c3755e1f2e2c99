"""Groups of members, and their order of eviction: the largest group loses a member first.

An attacker with many addresses gets around a fixed limit per address. Here nobody is refused while
another group has more members: the member that was inactive longest is evicted, from the largest
part of the largest group. Connections and event streams are closed in this order.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from functools import lru_cache
from typing import Generic, TypeVar

from muster.lifecycle import machine_of

T = TypeVar("T")


class Crowd(Generic[T]):
    """A tree of groups; a path, such as (network, address), names a member's group."""

    def __init__(self) -> None:
        self._members: dict[T, None] = {}
        self._parts: dict[str, Crowd[T]] = {}
        self._by_size: dict[int, dict[str, None]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        """Yield members in order of eviction; the tree must not change meanwhile."""
        yield from self._members
        for size in sorted(self._by_size, reverse=True):
            for name in self._by_size[size]:
                yield from self._parts[name]

    def part(self, *path: str) -> Crowd[T]:
        """Return the members below a path."""
        found = self
        for name in path:
            found = found._parts.get(name) or Crowd()
        return found

    def add(self, member: T, *path: str) -> None:
        """Add a member, as the last of its part to be evicted."""
        self._change(member, path, by=1)

    def remove(self, member: T, *path: str) -> None:
        """Remove a member."""
        self._change(member, path, by=-1)

    def touch(self, member: T, *path: str) -> None:
        """Note a member's activity, which moves it to the end of its part."""
        part = self
        for name in path:
            equals, part = part._by_size[len(part._parts[name])], part._parts[name]
            equals[name] = equals.pop(name)
        part._members[member] = part._members.pop(member)

    def _change(self, member: T, path: tuple[str, ...], *, by: int) -> None:
        self._size += by
        if not path:
            if by > 0:
                self._members[member] = None
            else:
                del self._members[member]
            return
        name, *rest = path
        part = self._parts.setdefault(name, Crowd())
        self._forget_size(name, len(part))
        part._change(member, tuple(rest), by=by)
        if part:
            self._by_size.setdefault(len(part), {})[name] = None
        else:
            del self._parts[name]

    def _forget_size(self, name: str, size: int) -> None:
        if size:
            del self._by_size[size][name]
            if not self._by_size[size]:
                del self._by_size[size]


@lru_cache(maxsize=4096)
def place_of(host: str) -> tuple[str, str]:
    """Return the network and the machine of an address, as limits count them.

    A network is a block that is usually rented as a whole: an IPv4 /24 or an IPv6 /48.
    """
    machine = machine_of(host)
    try:
        version = ipaddress.ip_address(machine).version
    except ValueError:
        return machine, machine
    network = ipaddress.ip_network((machine, 24 if version == 4 else 48), strict=False)
    return str(network), machine
