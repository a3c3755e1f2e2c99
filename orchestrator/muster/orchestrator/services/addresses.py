"""Network addresses as limits see them, and those of reverse proxies that are believed."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

from muster.protocol.errors import ConfigError

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@lru_cache(maxsize=4096)
def subnet_of(host: str) -> str:
    """Return what stands for one machine: an IPv4 address, or the /64 of an IPv6 one.

    Whoever has one IPv6 address has all of its /64, and could use a new one for every request.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)).network_address)


class Proxies:
    """The addresses of trusted reverse proxies, as in the settings: single ones and networks."""

    def __init__(self, text: str) -> None:
        """Raises ConfigError for anything else than addresses and networks."""
        names = [name.strip() for name in text.split(",") if name.strip()]
        try:
            self._networks: list[_Network] = [ipaddress.ip_network(name) for name in names]
        except ValueError as error:
            raise ConfigError(
                f"trusted_proxies: {error}",
                hint="give addresses or networks, separated by commas: 10.0.0.7, 10.1.0.0/16",
            ) from error

    def __contains__(self, host: object) -> bool:
        if not self._networks:
            return False
        try:
            address = ipaddress.ip_address(str(host))
        except ValueError:
            return False
        return any(address in network for network in self._networks)
