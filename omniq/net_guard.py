"""Which addresses omniq may be told to connect to: the one guard against requests that name a URL
to reach what only this machine can reach (server-side request forgery).

A name is resolved here, every address it has is checked, and the caller connects to the address
that was checked, as :func:`omniq.guarded_http.exchange` does: a second look at the name could bring
another one (DNS rebinding)::

    target = await checked_url(url, allow=["*"])
    async with exchange("POST", target, headers={}, content=b"...") as answer: ...

A redirect is another URL: it is checked by a call of its own, or not followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from urllib.parse import SplitResult, urlsplit, urlunsplit

from omniq.errors import ConfigError, InvalidRequest

ANY = "*"
MAX_URL = 2048
LOOKUP_SECONDS = 5.0
PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

#: Addresses that Python calls global although they stand for, or lead to, others.
_LEADING_ELSEWHERE = (
    ipaddress.ip_network("2002::/16"),  # 6to4: an IPv4 address inside
    ipaddress.ip_network("64:ff9b::/96"),  # NAT64: an IPv4 address inside
    ipaddress.ip_network("64:ff9b:1::/48"),
    ipaddress.ip_network("fec0::/10"),  # site-local
    ipaddress.ip_network("192.88.99.0/24"),  # relays of 6to4
    ipaddress.ip_network("3fff::/20"),  # documentation
)
#: A name service may take its time over names that somebody has made for that: it holds up other
#: look-ups at most, never the threads that other work waits for.
_LOOKUPS = ThreadPoolExecutor(16, thread_name_prefix="omniq-names")
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")


@dataclass(frozen=True, slots=True)
class ResolvedTarget:
    """A URL that may be connected to, and the address that was checked."""

    url: str
    scheme: str
    host: str
    """As in the URL, without brackets: the name a certificate must have."""
    port: int
    address: str
    """IPv4 or IPv6 address to connect to."""
    path: str
    """Path and query."""

    @property
    def host_header(self) -> str:
        """Value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS.get(self.scheme) else f"{host}:{self.port}"

    @property
    def pinned_url(self) -> str:
        """The URL with the address in place of the name."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{self.scheme}://{address}:{self.port}{self.path}"


async def checked_url(
    url: str,
    *,
    allow: Sequence[str],
    schemes: Sequence[str] = ("https",),
    field: str = "url",
) -> ResolvedTarget:
    """As :func:`check_url`, for an event loop.

    Raises:
        InvalidRequest: also if the name service has not answered within ``LOOKUP_SECONDS``.
        ConfigError: an entry of ``allow`` is wrong.
    """
    check = partial(check_url, url, allow=allow, schemes=schemes, field=field)
    try:
        async with asyncio.timeout(LOOKUP_SECONDS):
            return await asyncio.get_running_loop().run_in_executor(_LOOKUPS, check)
    except TimeoutError as exc:
        message = f"its host was not found within {LOOKUP_SECONDS:g} s"
        raise _refused(field, message) from exc


def check_url(
    url: str,
    *,
    allow: Sequence[str],
    schemes: Sequence[str] = ("https",),
    field: str = "url",
) -> ResolvedTarget:
    """The checked address of ``url``. Asks the name service: not for an event loop's thread.

    Args:
        allow: hosts that may be named: ``*`` (any), ``example.com``, ``*.example.com`` (what is
            below it), and addresses or networks (``10.1.0.0/16``, ``127.0.0.1``). Private,
            loopback, link-local and other addresses that are not public are refused, whatever name
            leads to them, unless an address or network here has them.
        field: names the URL in the error.

    Raises:
        InvalidRequest: it is no such URL, its host may not be named, does not resolve, or leads to
            an address that is refused; the message names no address that was found.
        ConfigError: an entry of ``allow`` is wrong.
    """
    names, networks = parse_allow(allow)
    parts, port = _split(url, schemes, field)
    host = str(parts.hostname)
    if not networks and not _named(host, names):
        # Not even asked for: who keeps a name hears of every question.
        raise _refused(field, f"host {host!r} is not allowed")
    addresses = _resolve(host, port, field)
    inside = all(any(a in n for n in networks) for a in addresses)
    if not inside and not _named(host, names):
        raise _refused(field, f"host {host!r} is not allowed")
    for address in addresses:
        if not is_public(address) and not any(address in n for n in networks):
            raise _refused(field, f"host {host!r} leads to an address that is not public")
    path = urlunsplit(("", "", parts.path or "/", parts.query, ""))
    return ResolvedTarget(url, parts.scheme, host, port, str(addresses[0]), path)


def parse_allow(allow: Sequence[str]) -> tuple[list[str], list[Network]]:
    """Host names (and ``*``, ``*.name``), and networks, among the entries of an allow-list.

    Raises:
        ConfigError: an entry is neither.
    """
    names: list[str] = []
    networks: list[Network] = []
    for entry in allow:
        try:
            networks.append(ipaddress.ip_network(entry))
            continue
        except ValueError:
            pass
        name = entry.removeprefix("*.")
        if entry != ANY and (not _HOST_NAME.fullmatch(name) or name.replace(".", "").isdigit()):
            raise ConfigError(
                f"{entry!r} is no host to allow: must be '*', a name, '*.' and a name, an address "
                "or a network such as 10.1.0.0/16"
            )
        names.append(entry.lower().rstrip("."))
    return names, networks


def is_public(address: Address) -> bool:
    """Whether anybody on the internet would reach the same host under this address."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not any(address in n for n in _LEADING_ELSEWHERE)
    )


def _split(url: str, schemes: Sequence[str], field: str) -> tuple[SplitResult, int]:
    if len(url) > MAX_URL:
        raise _refused(field, f"must have at most {MAX_URL} characters, has {len(url)}")
    # Not what urlsplit would make of it: it drops line feeds and tabs.
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise _refused(field, "must be an ASCII URL without spaces, backslashes or control codes")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise _refused(field, f"must be a URL: {exc}") from exc
    if parts.scheme not in schemes:
        raise _refused(field, f"must be a URL with the scheme {' or '.join(schemes)}")
    if parts.username is not None or parts.password is not None:
        raise _refused(field, "must not hold a user name or password")
    host = parts.hostname or ""
    if not (_HOST_NAME.fullmatch(host) or _is_address(host)) or len(host) > 253:
        raise _refused(field, "must name a host")
    port = PORTS[parts.scheme] if port is None else port
    if port == 0:
        raise _refused(field, "must have a port from 1 to 65535")
    return parts, port


def _is_address(host: str) -> bool:
    try:
        return "%" not in host and bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _resolve(host: str, port: int, field: str) -> list[Address]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise _refused(field, f"host {host!r} is not known") from exc
    texts = dict.fromkeys(str(sockaddr[0]).partition("%")[0] for *_, sockaddr in found)
    addresses = [ipaddress.ip_address(text) for text in texts]
    return [
        a.ipv4_mapped if isinstance(a, ipaddress.IPv6Address) and a.ipv4_mapped else a
        for a in addresses
    ]


def _named(host: str, names: Sequence[str]) -> bool:
    host = host.lower().rstrip(".")
    return any(
        name in (ANY, host) or (name.startswith("*.") and host.endswith(name[1:])) for name in names
    )


def _refused(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {message}", fields=[{"field": field, "message": message}])
