"""Files of a request that lie on other hosts: fetched from an allow-list only, within bounds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from omniq.inputs.faults import invalid, too_large
from omniq.net_guard import checked_url
from omniq.settings import get_settings

if TYPE_CHECKING:
    import httpx

MOST_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)


def is_remote(value: Any) -> bool:
    """Whether a client gave the URL of a file on another host."""
    return isinstance(value, str) and value[:8].lower().startswith(("http://", "https://"))


async def fetch_remote(url: str, field: str) -> bytes:
    """The file at a URL whose host ``OMNIQ_REMOTE_MEDIA`` names.

    Each address is checked, then connected to as it was checked; a redirect is checked like the
    first URL, and does not lead from https to http. No proxies, cookies, or passwords of this
    machine are used.

    Raises:
        InvalidRequest: the host may not be asked or cannot be reached, or does not answer with a
            file.
        InputTooLarge: it has more bytes than an input may have.
    """
    import httpx  # noqa: PLC0415 - few systems fetch anything

    settings = get_settings()
    try:
        async with asyncio.timeout(settings.remote_timeout):
            return await _followed(url, field)
    except TimeoutError as exc:
        message = f"the file did not arrive within {settings.remote_timeout:g} s"
        raise invalid(field, message) from exc
    except httpx.HTTPError as exc:
        # Only its kind: what a connection says may tell of hosts that are nobody's business.
        raise invalid(field, f"the file cannot be fetched ({type(exc).__name__})") from exc


async def _followed(url: str, field: str) -> bytes:
    from omniq.guarded_http import exchange  # noqa: PLC0415 - imports httpx

    schemes: tuple[str, ...] = ("https", "http")
    for _ in range(MOST_REDIRECTS + 1):
        target = await checked_url(
            url, allow=get_settings().remote_media, schemes=schemes, field=field
        )
        if target.scheme == "https":
            schemes = ("https",)
        # A compressed body could be larger than its bytes tell.
        async with exchange("GET", target, headers={"accept-encoding": "identity"}) as response:
            if response.status_code not in REDIRECTS or "location" not in response.headers:
                return await _read(response, field)
            try:
                url = urljoin(url, response.headers["location"])
            except ValueError as exc:  # such as brackets that hold no address
                raise invalid(field, "its host redirects to what is no URL") from exc
    raise invalid(field, f"the URL redirects more than {MOST_REDIRECTS} times")


async def _read(response: httpx.Response, field: str) -> bytes:
    most = get_settings().max_input_bytes
    if response.status_code != 200:
        raise invalid(field, f"its host answers with status {response.status_code}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise invalid(field, "its host sends a compressed body")
    length = response.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > most:
        raise too_large(field, f"must have at most {most} bytes, has {length[:20]}")
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > most:
            raise too_large(field, f"must have at most {most} bytes")
    return bytes(data)
