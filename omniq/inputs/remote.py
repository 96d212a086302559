"""Files of a request that lie on other hosts: fetched from an allow-list only, within bounds."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from omniq.inputs.faults import invalid, too_large
from omniq.net_guard import checked_url
from omniq.settings import get_settings

if TYPE_CHECKING:
    import httpx

MOST_REDIRECTS = 3
#: Of one conversation.
MOST_FILES = 16
REDIRECTS = (301, 302, 303, 307, 308)
#: Parts of a message that name a file, and the field with its URL.
PARTS = ("image_url", "audio_url", "video_url")


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


async def with_remote_files(messages: Any, field: str) -> Any:
    """Messages in which each remote URL of an allowed host has become a data URL.

    All files of one conversation together have no more bytes and take no more time than one input
    may, and there are at most ``MOST_FILES``.

    Raises:
        InvalidRequest: or its subclass InputTooLarge, as :func:`fetch_remote`.
    """
    settings = get_settings()
    count = sum(_url_of(part) is not None for message in messages for part in _parts(message))
    if count > MOST_FILES:
        message = f"must name at most {MOST_FILES} files on other hosts, names {count}"
        raise invalid(field, message)
    try:
        async with asyncio.timeout(settings.remote_timeout):
            return await _with_files(messages, field, settings.max_input_bytes)
    except TimeoutError as exc:
        message = f"its files did not arrive within {settings.remote_timeout:g} s"
        raise invalid(field, message) from exc


def _parts(message: Any) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


async def _with_files(messages: Any, field: str, most: int) -> Any:
    left, made = most, []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                url = _url_of(part)
                if url is not None:
                    data = await fetch_remote(url, field)
                    left -= len(data)
                    if left < 0:
                        raise too_large(field, f"its files have more than {most} bytes together")
                    part = _with_url(part, data)  # noqa: PLW2901 - the same part
                parts.append(part)
            message = {**message, "content": parts}  # noqa: PLW2901 - the same message
        made.append(message)
    return made


def _url_of(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in PARTS:
        return None
    url = part.get(kind)
    url = url.get("url") if isinstance(url, dict) else url
    return url if is_remote(url) else None


def _with_url(part: dict[str, Any], data: bytes) -> dict[str, Any]:
    kind = part["type"]
    url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    more = part[kind] if isinstance(part[kind], dict) else {}
    return {**part, kind: {**more, "url": url}}


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
