"""From OpenAI's fields of the images routes to jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from omniq.config.pipeline import PipelineConfig
from omniq.config.served import ServedModel
from omniq.config.stage import Limit
from omniq.settings import get_settings
from omniq_api.openai_compat.faults import OpenAIError
from omniq_api.openai_compat.image_form import typed
from omniq_api.openai_compat.mapping import (
    Submission,
    find_model,
    input_of,
    submission_of,
    unable,
)
from omniq_api.openai_compat.schemas import ImageEditRequest, ImageRequest

COUNT = "num_images_per_prompt"
SIDES = ("width", "height")
SEEDS = 2**63


def find_image_model(name: str | None) -> ServedModel:
    """The model of that name, or the default pipeline.

    Raises:
        OpenAIError: there is none, or it makes no pictures.
    """
    model = find_model(get_settings().default_pipeline if name is None else name)
    if model.image is None:
        raise unable(model, "makes no pictures", "model")
    return model


def form_of(body: ImageRequest, model: ServedModel) -> str:
    """The format of the answer's files.

    Raises:
        OpenAIError: an address is asked for, and the file there has another format; or a quality
            of a file that is not lossy.
    """
    own = own_form(model)
    form = body.output_format or own
    if body.output_compression is not None and form == "png":
        raise OpenAIError(
            400,
            "output_compression: is given with output_format jpeg or webp only",
            param="output_compression",
        )
    if body.response_format == "url":
        if form != own:
            message = f"output_format: with response_format url must be {own}, as the file is made"
            raise OpenAIError(400, message, param="output_format")
        if body.output_compression is not None:
            message = "output_compression: is given with response_format b64_json only"
            raise OpenAIError(400, message, param="output_compression")
    return form


def own_form(model: ServedModel) -> str:
    """The format in which the pipeline makes its pictures."""
    assert model.image is not None, "checked when the model was found"
    return model.pipeline.outputs[model.image].format or "png"


def of_image(body: ImageRequest, model: ServedModel) -> Submission:
    """One job for all the pictures of a request; see :func:`divided`.

    Of an edit it has the pictures, and not yet the mask.

    Raises:
        OpenAIError: the model has no such input or parameter, or one is given twice.
    """
    inputs: dict[str, Any] = {input_of(model, "text", "prompt"): body.prompt}
    parameters, names = body.more, {}
    if isinstance(body, ImageEditRequest):
        parameters = typed(model.pipeline, parameters)
        name = model.picture_inputs()[0]
        if name is None:
            raise unable(model, "takes no pictures", "image")
        inputs[name] = body.image if len(body.image) > 1 else body.image[0]
        names = {f"input.{name}.{i}": f"image.{i}" for i in range(len(body.image))}
        names[f"input.{name}"] = "image"
    if body.size not in (None, "auto"):
        sides = (int(side) for side in str(body.size).split("x"))
        for name, side in zip(SIDES, sides, strict=True):
            _set(model, parameters, name, side, "size")
            names[f"parameters.{name}"] = "size"
    if body.n is not None and (body.n == 1 or _at_once(model.pipeline, body.n)):
        if COUNT in model.pipeline.takers:
            _set(model, parameters, COUNT, body.n, "n")
            names[f"parameters.{COUNT}"] = "n"
    elif body.n is not None and COUNT in parameters:
        raise OpenAIError(400, f"n: is given twice, also as {COUNT}", param="n")
    labels = {"safety_identifier": body.safety_identifier} if body.safety_identifier else {}
    return submission_of(
        model, inputs, parameters, "prompt", user=body.user, metadata=labels, names=names
    )


def mask_input(model: ServedModel) -> str:
    """Name of the model's input for masks.

    Raises:
        OpenAIError: it has none.
    """
    name = model.picture_inputs()[1]
    if name is None:
        raise unable(model, "takes no mask", "mask")
    return name


def divided(
    submission: Submission,
    pipeline: PipelineConfig,
    complete: dict[str, dict[str, Any]],
    n: int | None,
) -> list[Submission]:
    """The job itself if it makes ``n`` pictures, else ``n`` jobs of one each.

    As within one job, picture *i* uses seed + *i*.

    Args:
        complete: the job's parameters by stage, defaults filled in.
    """
    if n is None or n == 1 or _at_once(pipeline, n):
        return [submission]
    parameters = dict(submission.parameters)
    if COUNT in pipeline.takers:
        parameters[COUNT] = 1
    jobs = []
    for i in range(n):
        own = dict(parameters)
        for stage, values in complete.items():
            if values.get("seed") is not None:
                seed = (values["seed"] + i) % SEEDS
                own[stage] = {**own.get(stage, {}), "seed": seed}
        jobs.append(replace(submission, parameters=own))
    return jobs


def _at_once(pipeline: PipelineConfig, n: int) -> bool:
    """Whether every stage that counts pictures may make so many in one run."""
    stages = pipeline.takers.get(COUNT, [])
    return bool(stages) and not any(s.limits.get(COUNT, Limit()).fault(n) for s in stages)


def _set(model: ServedModel, parameters: dict[str, Any], name: str, value: Any, param: str) -> None:
    if name not in model.pipeline.takers:
        raise unable(model, f"has no parameter {name}", param)
    if name in parameters:
        raise OpenAIError(400, f"{param}: is given twice, also as {name}", param=param)
    parameters[name] = value
