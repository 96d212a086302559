"""Validating one request against its pipeline: inputs, then parameters for each stage."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from omniq.config.pipeline import InputConfig, PipelineConfig
from omniq.config.stage import OmniStageConfig
from omniq.errors import InvalidRequest
from omniq.settings import get_settings

Fault = dict[str, str]
#: Levels of objects and lists within messages or a parameter: more than any schema has, and fewer
#: than the 255 that can be written.
MOST_LEVELS = 100


def validate_request(
    pipeline: PipelineConfig,
    inputs: dict[str, Any],
    parameters: dict[str, Any],
) -> dict[str, dict[str, Any]]:
    """Check a request and return each stage's complete parameters (defaults filled in).

    ``parameters`` is flat: a name goes to every stage whose engine type knows it. A key that is a
    stage id with an object as value overrides for that stage only:
    ``{"seed": 1, "ar": {"seed": 2}}``.

    Raises:
        InvalidRequest: listing every faulty field and what is allowed.
    """
    faults = _check_inputs(pipeline, inputs)
    faults += [
        _fault(f"parameters.{name}", _TOO_DEEP)
        for name, value in parameters.items()
        if _is_deeper(value, MOST_LEVELS)
    ]
    stages, more = _split(pipeline, parameters)
    faults += more
    complete: dict[str, dict[str, Any]] = {}
    for stage in pipeline.stages:
        given, overridden = stages[stage.stage_id]
        complete[stage.stage_id], more = _check_stage(stage, given, overridden)
        faults += more
    faults = [dict(f) for f in dict.fromkeys(tuple(f.items()) for f in faults)]
    if faults:
        first = faults[0]
        more_text = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise InvalidRequest(f"{first['field']}: {first['message']}{more_text}", fields=faults)
    return complete


def _check_inputs(pipeline: PipelineConfig, inputs: dict[str, Any]) -> list[Fault]:
    faults = []
    for name in inputs:
        if name not in pipeline.inputs:
            allowed = ", ".join(pipeline.inputs)
            faults.append(_fault(f"input.{name}", f"unknown input; allowed: {allowed}"))
    for name, spec in pipeline.inputs.items():
        field = f"input.{name}"
        if name not in inputs:
            if spec.required:
                faults.append(_fault(field, "required, but missing"))
            elif given := _that_require(pipeline, name, inputs):
                faults.append(_fault(field, f"required with {given[0]}, but missing"))
        elif spec.type == "messages" and _is_deeper(inputs[name], MOST_LEVELS):
            faults.append(_fault(field, _TOO_DEEP))
        elif (message := _FAULT[spec.type](spec, inputs[name])) is not None:
            faults.append(_fault(field, message))
    return faults


def _that_require(pipeline: PipelineConfig, name: str, inputs: dict[str, Any]) -> list[str]:
    return [n for n, spec in pipeline.inputs.items() if n in inputs and name in spec.requires]


def _text_fault(spec: InputConfig, value: Any) -> str | None:
    if not isinstance(value, str):
        return f"must be a string, not {type(value).__name__}"
    longest = min(spec.max_length, get_settings().max_prompt_chars)
    if not spec.min_length <= len(value) <= longest:
        return f"must have {spec.min_length} to {longest} characters, has {len(value)}"
    if spec.min_length and not value.strip():
        return "must not be blank"
    if not is_unicode(value):
        return "must be valid Unicode (it holds a lone surrogate)"
    return None


def is_unicode(text: str) -> bool:
    """Whether it can be written: it holds no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _messages_fault(spec: InputConfig, value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return "must be a list of messages"
    texts, media = [], False
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {i} must be an object with a 'role'"
        content = message.get("content")
        if not isinstance(content, str | list | None):
            return f"'content' of message {i} must be text or a list of parts"
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                return f"a part of message {i} must be an object with a 'type'"
            if part["type"] == "text":
                texts.append(part.get("text") or "")
            else:
                media = True
    if any(not isinstance(text, str) for text in texts):
        return "'text' of a part must be a string"
    # Media within are bounded by the size of the request, and may stand without words.
    text = "".join(texts)
    return None if media and not text.strip() else _text_fault(spec, text)


def _token_ids_fault(spec: InputConfig, value: Any) -> str | None:
    if not isinstance(value, list) or any(type(i) is not int or i < 0 for i in value):
        return "must be a list of integers from 0"
    if not spec.min_length <= len(value) <= spec.max_length:
        return f"must have {spec.min_length} to {spec.max_length} token ids, has {len(value)}"
    return None


def _file_fault(spec: InputConfig, value: Any) -> str | None:
    """The outer form; what a file holds is looked at when it is read (:mod:`omniq.inputs`)."""
    if value is None:
        return "must not be null"
    if not isinstance(value, list | tuple):
        return None
    if spec.type not in _SEVERAL:
        return "must be one file, not a list"
    if not 1 <= len(value) <= spec.max_items:
        return f"must have 1 to {spec.max_items} {_SEVERAL[spec.type]}, has {len(value)}"
    return None


#: Types of which a request may have several files, and how they are called.
_SEVERAL = {"image": "pictures", "audio": "sounds", "video": "videos"}
_TOO_DEEP = f"may hold objects and lists in at most {MOST_LEVELS} levels"


def _is_deeper(value: Any, most: int) -> bool:
    """Whether objects and lists in ``value`` are nested in more than ``most`` levels."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deeper(v, most - 1) for v in inner)


_FAULT = {
    "text": _text_fault,
    "messages": _messages_fault,
    "token_ids": _token_ids_fault,
    "image": _file_fault,
    "audio": _file_fault,
    "video": _file_fault,
    "latents": _file_fault,
}


def _split(
    pipeline: PipelineConfig, parameters: dict[str, Any]
) -> tuple[dict[str, tuple[dict[str, Any], dict[str, Any]]], list[Fault]]:
    """Per stage: (shared parameters, stage-only overrides)."""
    faults: list[Fault] = []
    result: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        s.stage_id: ({}, {}) for s in pipeline.stages
    }
    for name, value in parameters.items():
        takers = pipeline.takers.get(name, ())
        if name in result and not takers:
            if isinstance(value, dict):
                result[name][1].update(value)
            else:
                faults.append(_fault(f"parameters.{name}", "must be an object of parameters"))
        elif takers:
            for stage in takers:
                result[stage.stage_id][0][name] = value
        else:
            allowed = ", ".join(sorted(pipeline.takers))
            faults.append(_fault(f"parameters.{name}", f"unknown parameter; allowed: {allowed}"))
    return result, faults


def _check_stage(
    stage: OmniStageConfig, shared: dict[str, Any], own: dict[str, Any]
) -> tuple[dict[str, Any], list[Fault]]:
    model = stage.parameter_model
    given = {k: v for k, v in {**shared, **own}.items() if v is not None}

    def field_of(name: str) -> str:
        prefix = f"parameters.{stage.stage_id}" if name in own else "parameters"
        return f"{prefix}.{name}"

    faults: dict[str, Fault] = {}
    complete = {**stage.defaults, **given}
    try:
        # As `model_validate`, without the options that it looks at.
        model.__pydantic_validator__.validate_python(complete)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False)
        # Of the forms that a parameter may have, the one whose type was right tells more.
        for error in sorted(errors, key=lambda e: e["type"].endswith("_type")):
            if not error["loc"]:  # pydantic cannot even name it
                where = f"parameters.{stage.stage_id}"
                faults[""] = _fault(where, "a parameter's name must be valid Unicode")
                continue
            name = str(error["loc"][0])
            place = ".".join(str(part) for part in error["loc"][1:] if not is_form(part))
            message = f"{place}: {error['msg'].removeprefix('Value error, ')}".lstrip(": ")
            if error["type"] == "extra_forbidden" and len(error["loc"]) == 1:
                message = f"unknown parameter; allowed: {', '.join(model.model_fields)}"
            faults.setdefault(name, _fault(field_of(name), message))
    for name, limit in stage.limits.items():
        if name in complete and (fault := limit.fault(complete[name])):
            faults.setdefault(name, _fault(field_of(name), fault))
    return complete, list(faults.values())


def is_form(part: int | str) -> bool:
    """Whether a part of an error's place is pydantic's name for one of several allowed types."""
    return part == "str" or str(part).startswith(("constrained-", "function-", "list[", "dict["))


def _fault(field: str, message: str) -> Fault:
    return {"field": field, "message": message}
