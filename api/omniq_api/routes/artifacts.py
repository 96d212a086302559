"""A job's result files."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

from fastapi import APIRouter, Header, Path, Response

from omniq.jobs.model import ArtifactInfo
from omniq_api.openapi import FILE, problems
from omniq_api.paths import REST
from omniq_api.problems import ProblemError
from omniq_api.routes.jobs import JobId
from omniq_api.services import Live

MAX_FILENAME = 100
MAX_AGE = 3600

router = APIRouter(prefix="/v1/jobs/{job_id}/artifacts", tags=["jobs"])


@router.get(
    f"/{REST}",
    summary="Read a result file",
    response_class=Response,
    responses={
        200: {
            "description": "The file's bytes, with its content type.",
            "content": {"*/*": FILE},
        },
        304: {"description": "Unchanged since the `ETag` in `If-None-Match`."},
        **problems(404, 409, 410, 503),
    },
)
async def get_artifact(
    services: Live,
    job_id: JobId,
    name: Annotated[str, Path(examples=["image"])],
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """One file of the job, as soon as the stage that makes it has finished."""
    record = await services.store.get(job_id)
    info = record.artifacts.get(name)
    if info is None and not record.state.final:
        raise ProblemError(
            409,
            "job_not_finished",
            f"job {job_id} is {record.state}; it has no artifact {name!r} yet",
        )
    if info is not None and _matches(if_none_match, etag(info)):
        return Response(status_code=304, headers=_headers(info))
    data, info = await services.store.get_artifact(job_id, name)
    return artifact_response(data, info)


def artifact_response(
    data: bytes, info: ArtifactInfo, extra_headers: dict[str, str] | None = None
) -> Response:
    """The file, safe to open in a browser whatever it holds."""
    return Response(
        data, media_type=info.content_type, headers={**_headers(info), **(extra_headers or {})}
    )


def first_media(artifacts: dict[str, ArtifactInfo], outputs: list[str]) -> str | None:
    """Name of the first picture, video or sound, in the order of the pipeline's outputs."""
    for name in [*(o for o in outputs if o in artifacts), *artifacts]:
        if artifacts[name].content_type.startswith(("image/", "video/", "audio/")):
            return name
    return None


def etag(info: ArtifactInfo) -> str:
    """A file is written once under its key, so the key stands for the bytes."""
    return f'"{hashlib.blake2b(info.key.encode(), digest_size=16).hexdigest()}"'


def _headers(info: ArtifactInfo) -> dict[str, str]:
    return {
        "etag": etag(info),
        "cache-control": f"private, max-age={MAX_AGE}, immutable",
        "content-disposition": f'inline; filename="{filename(info)}"',
        "x-content-type-options": "nosniff",
        "content-security-policy": "default-src 'none'; sandbox",
    }


def filename(info: ArtifactInfo) -> str:
    """The artifact's name as a harmless file name."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", info.name).lstrip(".")[:MAX_FILENAME]
    return safe or "artifact"


def _matches(if_none_match: str | None, tag: str) -> bool:
    if if_none_match is None:
        return False
    given = [part.strip().removeprefix("W/") for part in if_none_match.split(",")]
    return "*" in given or tag in given
