"""The form of ``POST /v1/images/edits``: files, and texts that stand for values of any type."""

from __future__ import annotations

import types
from typing import Annotated, Any, Union, get_args, get_origin

import orjson
from starlette.requests import Request

from omniq.config.pipeline import PipelineConfig
from omniq.config.stage import OmniStageConfig
from omniq_api.openai_compat.faults import OpenAIRoute
from omniq_api.strict_json import FORM, bad_form, form_parts

FILES = ("image", "mask")
#: Fields of OpenAI's that are no texts.
VALUES = ("n", "output_compression", "partial_images", "stream")
MAX_FIELDS = 256


class ImageFormRoute(OpenAIRoute):
    """A route that reads forms as OpenAI's clients write them: ``a``, ``a[]``, ``a[key]``."""

    accepts = (FORM,)

    async def read_form(self, request: Request) -> Any:
        """The fields by name; ``image`` always is a list."""
        body: dict[str, Any] = {}
        for part, item in await form_parts(request, MAX_FIELDS):
            name, bracket, key = part.removesuffix("]").partition("[")
            if name not in FILES and isinstance(item, bytes):
                raise bad_form(part, f"must not be a file; files are {' and '.join(FILES)}")
            if name in FILES and isinstance(item, str):
                raise bad_form(part, "must be a file")
            if name == "image" or (bracket and not key):
                held = body.setdefault(name, [])
                key = str(len(held)) if isinstance(held, list) else ""
            elif bracket:
                held = body.setdefault(name, {})
            else:
                held, key = body, name
            if isinstance(held, list) and key == str(len(held)):
                held.append(item)
            elif isinstance(held, dict) and key and key not in held:
                held[key] = item
            else:
                raise bad_form(part, "is given twice")
        return {n: _value(v, int | bool) if n in VALUES else v for n, v in body.items()}


def typed(pipeline: PipelineConfig, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a form as values of their types.

    What is none stays a text, and is refused as every wrong value.
    """
    stages = {s.stage_id: s for s in pipeline.stages}
    found = {}
    for name, value in parameters.items():
        if name in pipeline.takers:
            found[name] = _parameter(pipeline.takers[name][0], name, value)
        elif name in stages and isinstance(own := _value(value, dict), dict):
            found[name] = {k: _parameter(stages[name], k, v) for k, v in own.items()}
        else:
            found[name] = value
    return found


def _parameter(stage: OmniStageConfig, name: str, value: Any) -> Any:
    known = stage.parameter_model.model_fields.get(name)
    return value if known is None else _value(value, known.annotation)


def _value(value: Any, hint: Any) -> Any:
    """``value`` with its texts read as JSON, except where ``hint`` allows a text."""
    kinds = _kinds(hint)
    if isinstance(value, str):
        if str in kinds:
            return value
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    if isinstance(value, list | dict):
        inner = next((get_args(k)[-1] for k in kinds if get_origin(k) is type(value)), None)
        if isinstance(value, list):
            return [_value(v, inner) for v in value]
        return {k: _value(v, inner) for k, v in value.items()}
    return value


def _kinds(hint: Any) -> list[Any]:
    """The types of a union, without their annotations."""
    if get_origin(hint) is Annotated:
        return _kinds(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for each in get_args(hint) for kind in _kinds(each)]
    return [hint]
