"""What a request for a job asks for, checked before anything is done for it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omniq.config import PipelineConfig
from omniq.config.request import is_unicode, validate_request
from omniq.errors import InvalidRequest
from omniq.jobs.admission import Share
from omniq.jobs.model import JobSpec, new_job_id

PRIORITIES = range(10)
DEFAULT_PRIORITY = 5


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A valid request: all of its job but what depends on when it is made."""

    fields: Mapping[str, Any]
    """Of :class:`JobSpec`."""
    timeout: float | None
    """Seconds from its creation to its deadline."""

    def job(self, created: float) -> JobSpec:
        """The job, with a new id; ``created`` is Unix time by the clock that all hosts agree on."""
        deadline = None if self.timeout is None else created + self.timeout
        return JobSpec(id=new_job_id(created), created=created, deadline=deadline, **self.fields)


def checked_request(
    config: PipelineConfig,
    inputs: dict[str, Any],
    parameters: dict[str, Any],
    *,
    priority: int | None = None,
    timeout: float | None = None,
    metadata: Mapping[str, str] | None = None,
    stream: bool = True,
    share: Share | None = None,
    outputs: Sequence[str] | None = None,
    allow_partial: bool = False,
    formats: Mapping[str, str] | None = None,
) -> ValidRequest:
    """The request if it is valid and that tenant's; arguments as of :func:`omniq.submit.submit`.

    A seed that is not given is drawn here.

    Raises:
        InvalidRequest: naming every faulty field.
    """
    share = share or Share()
    if priority is None:
        priority = min(DEFAULT_PRIORITY, share.max_priority)
    elif type(priority) is not int or priority not in PRIORITIES[: share.max_priority + 1]:
        raise refused("priority", f"must be 0 to {share.max_priority}", got=priority)
    if timeout is not None and not (_is_number(timeout) and 0 < timeout < math.inf):
        raise refused("timeout", "must be seconds above 0", got=timeout)
    for field, value in (("input", inputs), ("parameters", parameters)):
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise refused(field, "must be an object")
    for field, labels in (("metadata", metadata), ("formats", formats)):
        if labels is not None and not _are_texts(labels):
            raise refused(field, "must be an object of texts")
    if not isinstance(allow_partial, bool):
        raise refused("allow_partial", "must be true or false", got=allow_partial)
    wanted = _wanted(config, outputs)
    if formats:
        _check_formats(config, formats, wanted)
    complete = validate_request(config, inputs, parameters)
    seed = secrets.randbelow(2**32)
    for stage in config.takers.get("seed", ()):
        complete[stage.stage_id].setdefault("seed", seed)
    fields = {
        "pipeline": config.name,
        "pipeline_version": config.version,
        "inputs": dict(inputs),
        "parameters": complete,
        "stages": config.topological_order() if outputs is None else config.stages_for(wanted),
        "priority": priority,
        "tenant": share.tenant,
        "metadata": dict(metadata or {}),
        "formats": dict(formats or {}),
        "stream": stream,
        "partial": {o: config.outputs[o].producer for o in wanted} if allow_partial else {},
    }
    return ValidRequest(fields, timeout)


def merged(parameters: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as one mapping; ``more`` wins.

    Raises:
        InvalidRequest: the first is no mapping.
    """
    if parameters is not None and not isinstance(parameters, Mapping):
        raise refused("parameters", f"must be a mapping, not {type(parameters).__name__}")
    return {**(parameters or {}), **more}


def refused(field: str, message: str, *, got: Any = None) -> InvalidRequest:
    """The error for one faulty field; ``got`` is shown unless it is None."""
    shown = "" if got is None else f"; got {got!r}"
    return InvalidRequest(
        f"{field}: {message}{shown}", fields=[{"field": field, "message": message}]
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_texts(labels: Any) -> bool:
    return isinstance(labels, Mapping) and all(
        isinstance(text, str) and is_unicode(text) for item in labels.items() for text in item
    )


def _wanted(config: PipelineConfig, outputs: Sequence[str] | None) -> list[str]:
    """Names of the outputs that are to be made.

    Raises:
        InvalidRequest: the pipeline has no such output, or none is named.
    """
    if outputs is None:
        return list(config.outputs)
    message = f"must be some of {', '.join(config.outputs)}"
    if isinstance(outputs, str) or not isinstance(outputs, Sequence) or not outputs:
        raise refused("outputs", message)
    for name in outputs:
        if not isinstance(name, str) or name not in config.outputs:
            raise refused("outputs", message, got=name)
    return list(outputs)


def _check_formats(
    config: PipelineConfig, formats: Mapping[str, str], wanted: Sequence[str]
) -> None:
    """Whether each is one of an output that is made.

    Raises:
        InvalidRequest: one is not.
    """
    from omniq.outputs import MultimodalOutputProcessor  # noqa: PLC0415 - few requests need it

    processor = MultimodalOutputProcessor()
    for name, form in formats.items():
        allowed = processor.formats_of(config.outputs[name]) if name in wanted else ()
        if form in allowed:
            continue
        message = f"must be one of {', '.join(allowed)}; got {form!r}"
        if name not in wanted:
            message = f"no such output is made; made are: {', '.join(wanted)}"
        elif not allowed:
            message = "the output's type has no formats"
        raise refused(f"formats.{name}", message)
