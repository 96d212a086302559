"""HTTP to addresses that :mod:`omniq.net_guard` has checked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx

from omniq.net_guard import ResolvedTarget


@asynccontextmanager
async def exchange(
    method: str,
    target: ResolvedTarget,
    *,
    headers: Mapping[str, str],
    content: bytes | None = None,
    timeout: float | None = None,
) -> AsyncIterator[httpx.Response]:
    """The answer of the address that was checked, its body unread.

    No redirect is followed, and no proxies, cookies or passwords of this machine are used.

    Args:
        timeout: seconds for each part of the exchange; None: the caller bounds it.

    Raises:
        httpx.HTTPError: there is none.
    """
    own = {"host": target.host_header, "user-agent": "omniq"}
    async with (
        httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=timeout) as client,
        client.stream(
            method,
            target.pinned_url,
            content=content,
            headers={**own, **headers},
            extensions={"sni_hostname": target.host},
        ) as answer,
    ):
        yield answer
