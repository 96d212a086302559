"""The Redis or Valkey that ``OMNIQ_BROKER_URL`` names: checking it, and watching it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from omniq.errors import BrokerUnavailable, ConfigError
from omniq.settings import Settings

CONNECT_TIMEOUT = 15.0
"""Seconds a configured server may take to appear when everything starts at once."""
PING_EVERY = 5.0
OLDEST = (6, 2)
"""First version with every command omniq uses (GETDEL, COPY, ZADD GT, XAUTOCLAIM, ...)."""


def safe_url(url: str) -> str:
    """The URL without its password, for messages and logs."""
    password = urlsplit(url).password
    return url.replace(f":{password}@", ":***@", 1) if password else url


def wait_for_server(url: str, seconds: float) -> bool:
    """Whether a server answers at ``url`` within that time."""
    deadline = time.monotonic() + seconds
    with redis.Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0) as client:
        while True:
            try:
                return bool(client.ping())
            except RedisError:
                if time.monotonic() > deadline:
                    return False
            time.sleep(0.1)


def check_server(url: str, *, wait: float = 0.0) -> list[str]:
    """What runs at ``url`` (redis-py's spelling): one line each for version, policy and warnings.

    Raises:
        BrokerUnavailable: no answer within ``wait`` seconds.
        ConfigError: it refuses the credentials, or is too old.
    """
    with redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
        info = _info(client, safe_url(url), time.monotonic() + wait)
    name = str(info.get("server_name") or "redis").capitalize()
    version = str(info.get("valkey_version") or info["redis_version"])
    lines = [f"{name} {version} at {safe_url(url)}"]
    # Valkey reports the Redis version it is compatible with as redis_version.
    compatible = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if compatible < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"{lines[0]}: too old", hint=f"omniq needs Redis {oldest} or Valkey")
    policy = str(info.get("maxmemory_policy", "unknown"))
    lines.append(f"maxmemory {info.get('maxmemory_human', 'unknown')}, eviction policy {policy}")
    if policy != "noeviction" and info.get("maxmemory"):
        lines.append(
            f"WARNING: {policy} may drop queued jobs when memory is short; "
            "set maxmemory-policy noeviction"
        )
    if not info.get("aof_enabled") and not info.get("rdb_last_save_time"):
        lines.append("WARNING: neither AOF nor snapshots: a restart of the server loses all jobs")
    return lines


def _info(client: redis.Redis, where: str, deadline: float) -> dict[str, Any]:
    while True:
        try:
            return client.info()
        except (AuthenticationError, NoPermissionError, ResponseError) as exc:
            raise ConfigError(
                f"{where} refuses omniq: {exc}", hint="check user and password in OMNIQ_BROKER_URL"
            ) from exc
        except RedisError as exc:
            if time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"no answer from {where}: {exc}",
                    hint="start that server, correct OMNIQ_BROKER_URL, or unset it to use the "
                    "embedded Valkey",
                ) from exc
        time.sleep(0.2)


def watch(settings: Settings, stopped: Callable[[], bool]) -> int:
    """Check the configured server, then stay until ``stopped()``; returns the exit code.

    It stays because honcho stops everything as soon as one process ends. An outage is reported but
    does not end it: API and workers ride it out.

    Raises:
        BrokerUnavailable, ConfigError: as :func:`check_server`.
    """
    for line in check_server(settings.redis_url, wait=CONNECT_TIMEOUT):
        print(f"broker: {line}", flush=True)
    where = safe_url(settings.redis_url)
    client = redis.Redis.from_url(
        settings.redis_url, socket_timeout=2.0, socket_connect_timeout=2.0
    )
    up, checked = True, time.monotonic()
    while not stopped():
        time.sleep(0.2)
        if time.monotonic() - checked < PING_EVERY:
            continue
        checked = time.monotonic()
        try:
            client.ping()
        except RedisError as exc:
            if up:
                print(f"broker: no answer from {where}: {exc}", flush=True)
            up = False
        else:
            if not up:
                print(f"broker: {where} answers again", flush=True)
            up = True
    client.close()
    return 0
