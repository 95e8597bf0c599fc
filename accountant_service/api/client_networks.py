"""The network by which a client counts, where clients take turns or have limits."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final

_IPV6_BITS: Final = 64  # one subscriber has all addresses of such a network


@lru_cache(maxsize=4096)
def client_network(address: str) -> str:
    """Return an IPv4 address unchanged, and the /64 network of an IPv6 address.

    An IPv4 address that is written as an IPv6 one counts as the IPv4 address. Text that is no
    address, such as that of a test's client, is returned unchanged.
    """
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ip_network((int(found), _IPV6_BITS), strict=False))
