"""Where a file comes from: bytes, a data URL, a result of another job, and locally also a path."""

from __future__ import annotations

import base64
import binascii
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from omniq.inputs.faults import invalid, too_large
from omniq.inputs.remote import is_remote
from omniq.settings import get_settings

#: The path under which the API serves a result file; it may be mounted under another one.
_ARTIFACT_PATH = re.compile(r"/(?:[^?#]*/)?v1/jobs/([a-z0-9-]{1,64})/artifacts/([^?#]+)")
#: What a client is told that names another host.
NOTHING_FETCHED = (
    "nothing is fetched from a network here (OMNIQ_REMOTE_MEDIA); send the file itself (a data: "
    "URL or an upload), or name a result of another job"
)
#: Of both, in characters: more names nothing, and would be repeated in an error.
_MOST_NAME = 256
#: Of such a path, with the one it is mounted under.
_MOST_PATH = 2048


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on another host."""

    url: str


@dataclass(frozen=True, slots=True)
class ArtifactId:
    """A result file of a job."""

    job: str
    artifact: str


def is_artifact_path(url: str) -> bool:
    """Whether that is the path under which the API serves a result file."""
    return len(url) <= _MOST_PATH and _ARTIFACT_PATH.fullmatch(url) is not None


def source_of(value: Any, field: str, *, local: bool) -> Any:
    """Bytes, an :class:`ArtifactId` or a :class:`RemoteFile` for what a client gave; anything else
    as it is.

    Nothing is fetched here. Paths are read only where the client runs in this
    process (``local``).

    Raises:
        InputTooLarge: more bytes than ``OMNIQ_MAX_INPUT_BYTES`` allows.
        InvalidRequest: a faulty data URL, a remote URL, a file that cannot be read.
    """
    found = value
    if isinstance(value, bytes | bytearray | memoryview):
        found = bytes(value)
    elif isinstance(value, dict) and not (local and _holds_arrays(value)):
        found = _artifact_of(value, field)
    elif isinstance(value, str):
        found = _of_text(value, field, local=local)
    elif local and isinstance(value, os.PathLike):
        found = _of_path(Path(value), field)
    elif local and isinstance(getattr(value, "data", None), bytes):  # a result's Artifact
        found = value.data
    if isinstance(found, bytes):
        _check_size(len(found), field)
    return found


def _of_text(value: str, field: str, *, local: bool) -> bytes | ArtifactId | RemoteFile:
    if value[:5].lower() == "data:":
        return _of_data_url(value, field)
    if (match := _ARTIFACT_PATH.fullmatch(value)) is not None:
        return _artifact_of({"job": match[1], "artifact": unquote(match[2])}, field)
    if is_remote(value) and get_settings().remote_media:
        return RemoteFile(value)
    if "://" in value[:16]:
        raise invalid(field, NOTHING_FETCHED)
    if local:
        return _of_path(Path(value), field)
    raise invalid(
        field,
        "must be a data: URL, the URL path of a result file (/v1/jobs/ID/artifacts/NAME), "
        'or {"job": ID, "artifact": NAME}',
    )


def _of_data_url(url: str, field: str) -> bytes:
    header, comma, data = url.partition(",")
    if not comma:
        raise invalid(field, "a data: URL has a comma in front of its data")
    if not header.lower().endswith(";base64"):
        return unquote_to_bytes(data)
    _check_size(len(data) // 4 * 3 - data[-2:].count("="), field)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise invalid(field, f"the data: URL holds no base64: {exc}") from exc


def _of_path(path: Path, field: str) -> bytes:
    try:
        _check_size(path.stat().st_size, field)
        return path.read_bytes()
    except (OSError, ValueError) as exc:
        raise invalid(field, f"no file that can be read: {exc}") from exc


def _artifact_of(value: dict[str, Any], field: str) -> ArtifactId:
    if set(value) != {"job", "artifact"} or not all(isinstance(v, str) for v in value.values()):
        raise invalid(field, 'an object names a result file: {"job": ID, "artifact": NAME}')
    if any(len(name) > _MOST_NAME for name in value.values()):
        raise invalid(
            field, f"a job or result file has at most {_MOST_NAME} characters in its name"
        )
    return ArtifactId(**value)


def _holds_arrays(value: dict[str, Any]) -> bool:
    return bool(value) and all(hasattr(v, "__array__") for v in value.values())


def _check_size(nbytes: int, field: str) -> None:
    most = get_settings().max_input_bytes
    if nbytes > most:
        raise too_large(field, f"must have at most {most} bytes, has {nbytes}")
