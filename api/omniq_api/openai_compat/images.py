"""``/v1/images/generations`` and ``/v1/images/edits``."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request, Response

from omniq.config.request import validate_request
from omniq.config.served import ServedModel
from omniq.errors import InvalidRequest
from omniq.inputs import read_inputs, read_transparency
from omniq.inputs.faults import invalid
from omniq.jobs.model import ArtifactInfo, JobRecord
from omniq.submit import fetch_input
from omniq_api.openai_compat import image_mapping, mapping, running
from omniq_api.openai_compat.answer_models import Pictures, answer
from omniq_api.openai_compat.faults import FAULTS, OpenAIError, OpenAIRoute, responses
from omniq_api.openai_compat.image_form import ImageFormRoute
from omniq_api.openai_compat.mapping import Submission
from omniq_api.openai_compat.schemas import ImageEditRequest, ImageRequest
from omniq_api.openai_error import SERVER
from omniq_api.schemas import artifact_url, job_urls
from omniq_api.services import Live, Services, idempotent
from omniq_api.strict_json import FORM

router = APIRouter(prefix="/images")
generations = APIRouter(route_class=OpenAIRoute)
edits = APIRouter(route_class=ImageFormRoute)


@generations.post(
    "/generations",
    summary="Make pictures",
    response_class=Response,
    dependencies=[Depends(idempotent)],
    responses={**answer(Pictures), **responses(*FAULTS)},
)
async def generate(request: Request, services: Live, body: ImageRequest) -> Response:
    """Pictures from a text. A client that disconnects cancels its jobs."""
    return await _pictures(request, services, body)


@edits.post(
    "/edits",
    summary="Make pictures from pictures",
    response_class=Response,
    dependencies=[Depends(idempotent)],
    responses={**answer(Pictures), **responses(*FAULTS)},
)
async def edit(
    request: Request, services: Live, body: Annotated[ImageEditRequest, Body(media_type=FORM)]
) -> Response:
    """Pictures from a text and pictures, or, with `mask`, a part of a picture made anew.

    A client that disconnects cancels its jobs.
    """
    return await _pictures(request, services, body)


router.include_router(generations)
router.include_router(edits)


async def _pictures(request: Request, services: Services, body: ImageRequest) -> Response:
    model = image_mapping.find_image_model(body.model)
    form = image_mapping.form_of(body, model)
    submissions = await _submissions(services, body, model)
    jobs = await running.submitted(services, submissions, stream=False)
    records = await running.finished(request, services, jobs, submissions)
    if not records:
        return running.gone()
    found = [(record, name) for record in records for name in _files(record, model)]
    if not found:
        raise OpenAIError(500, "the jobs made no picture", kind=SERVER)
    data = [
        await _entry(services, body, record, name, form=form, base=str(request.base_url))
        for record, name in found
    ]
    meta = found[0][0].artifacts[found[0][1]].meta
    return running.answer(
        {
            "created": int(records[0].spec.created),
            "data": data,
            "background": "opaque",
            "output_format": form,
            "size": f"{meta['width']}x{meta['height']}",
        }
    )


async def _submissions(
    services: Services, body: ImageRequest, model: ServedModel
) -> list[Submission]:
    """The jobs of a request, their files read once for all of them.

    Raises:
        OpenAIError: a field is faulty.
    """
    one = image_mapping.of_image(body, model)
    mask = body.mask if isinstance(body, ImageEditRequest) else None
    try:
        if mask is not None:
            one = await _with_mask(one, mask, model)
        complete = validate_request(model.pipeline, one.inputs, one.parameters)
        inputs = await read_inputs(model.pipeline, one.inputs, partial(fetch_input, services.store))
        if mask is not None:
            _check_mask(inputs, model)
    except InvalidRequest as exc:
        raise mapping.in_openai_terms(exc, one) from exc
    one = replace(one, inputs=inputs)
    return image_mapping.divided(one, model.pipeline, complete, body.n)


async def _with_mask(submission: Submission, data: bytes, model: ServedModel) -> Submission:
    name = image_mapping.mask_input(model)
    submission.names[f"input.{name}"] = "mask"
    mask = await read_transparency(model.pipeline, name, data)
    return replace(submission, inputs={**submission.inputs, name: mask})


def _check_mask(inputs: dict[str, Any], model: ServedModel) -> None:
    """The mask is as large as the (first) picture."""
    picture, mask = (inputs[str(name)].shown[0] for name in model.picture_inputs())
    if picture != mask:
        raise invalid(
            f"input.{model.picture_inputs()[1]}",
            "must have the picture's size, {width}x{height}".format(**picture)
            + "; has {width}x{height}".format(**mask),
        )


def _files(record: JobRecord, model: ServedModel) -> Sequence[str]:
    """Names of the job's pictures in order."""
    names = [f"{model.image}-{i}" if i else str(model.image) for i in range(len(record.artifacts))]
    return [name for name in names if name in record.artifacts]


async def _entry(
    services: Services, body: ImageRequest, record: JobRecord, name: str, *, form: str, base: str
) -> dict[str, str]:
    """One of the answer's ``data``."""
    if body.response_format == "url":
        return {"url": base.rstrip("/") + artifact_url(job_urls("", record.id).self, name)}
    data, info = await services.store.read_artifact(record, name)
    quality = body.output_compression
    if info.content_type != f"image/{form}" or quality is not None:
        encode = partial(_encoded, data, info, record, form=form, quality=quality)
        data = await asyncio.to_thread(encode)
    return {"b64_json": base64.b64encode(data).decode()}


def _encoded(
    data: bytes,
    info: ArtifactInfo,
    record: JobRecord,
    *,
    form: str,
    quality: int | None,
) -> bytes:
    """A result file in another format, with the same facts in it."""
    from PIL import Image  # noqa: PLC0415 - few requests need it

    from omniq.outputs.base import OutputContext  # noqa: PLC0415 - as above
    from omniq.outputs.image import encoded  # noqa: PLC0415 - as above

    own = OutputContext.of_job(record.spec).of_item(info.meta.get("index", 0))
    with Image.open(io.BytesIO(data)) as picture:
        return encoded(picture.convert("RGB"), form, own, quality)
