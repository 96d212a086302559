"""Whether a port can be listened on, asked before anything is started that needs it."""

from __future__ import annotations

import errno
import socket

from omniq.errors import ConfigError


def require_free(host: str, port: int, hint: str) -> None:
    """Check that this process could listen there.

    Raises:
        ConfigError: another process does (with that hint), the host is none of this machine, or
            the port is not for this user.
    """
    try:
        places = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as exc:
        raise ConfigError(f"cannot listen on {host}: {exc.strerror}") from exc
    for family, kind, protocol, _, address in places:
        try:
            probe = socket.socket(family, kind, protocol)
        except OSError:  # an address of a protocol that this machine does not have
            continue
        with probe:
            # As servers themselves do: a port in TIME_WAIT is free, and IPv6 is not IPv4.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
                raise ConfigError(f"port {port} on {host} is in use", hint=hint) from exc


def require_api_port(host: str, port: int) -> None:
    """:func:`require_free` for the HTTP API."""
    require_free(
        host,
        port,
        "is another omniq running here? Stop it, or choose another port: OMNIQ_API_PORT, or --port",
    )


def require_flower_port(host: str, port: int) -> None:
    """:func:`require_free` for Flower."""
    require_free(
        host, port, "is another omniq running here? Stop it, or choose another OMNIQ_FLOWER_PORT"
    )
