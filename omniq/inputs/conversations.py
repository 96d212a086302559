"""Files that a conversation names, which lie on other hosts or are results of other jobs."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from omniq.inputs.faults import invalid, too_large
from omniq.inputs.remote import is_remote
from omniq.inputs.sources import is_artifact_path
from omniq.settings import get_settings

#: Of one conversation.
MOST_FILES = 16
#: Parts of a message that name a file, and the field with its URL.
PARTS = ("image_url", "audio_url", "video_url")

Read = Callable[[str], Awaitable[bytes]]


async def with_files(messages: Any, field: str, read: Read) -> Any:
    """Messages in which the URL of each file that lies elsewhere has become a data URL: of an
    allowed host (``OMNIQ_REMOTE_MEDIA``), or of a result of another job.

    All files of one conversation together have no more bytes and take no more time than one input
    may, and there are at most ``MOST_FILES``. A conversation without any is returned as it is.

    Args:
        messages: of valid outer form.
        field: names them in errors.
        read: the file at such a URL.

    Raises:
        InvalidRequest: or its subclass InputTooLarge, as ``read``, or there are too many.
    """
    settings = get_settings()
    count = sum(_url_of(part) is not None for part in _parts(messages))
    if not count:
        return messages
    if count > MOST_FILES:
        message = f"must name at most {MOST_FILES} files that lie elsewhere, names {count}"
        raise invalid(field, message)
    try:
        async with asyncio.timeout(settings.remote_timeout):
            return await _with_files(messages, field, read, settings.max_input_bytes)
    except TimeoutError as exc:
        message = f"its files did not arrive within {settings.remote_timeout:g} s"
        raise invalid(field, message) from exc


def _parts(messages: Any) -> Iterator[Any]:
    for message in messages:
        content = message.get("content")
        yield from content if isinstance(content, list) else ()


async def _with_files(messages: Any, field: str, read: Read, most: int) -> Any:
    left, made = most, []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                url = _url_of(part)
                if url is not None:
                    data = await read(url)
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
    if is_remote(url):
        return url if get_settings().remote_media else None
    return url if isinstance(url, str) and is_artifact_path(url) else None


def _with_url(part: dict[str, Any], data: bytes) -> dict[str, Any]:
    kind = part["type"]
    url = f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    more = part[kind] if isinstance(part[kind], dict) else {}
    return {**part, kind: {**more, "url": url}}
