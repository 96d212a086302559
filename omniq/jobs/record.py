"""Reading a job's hash; what writes it are the scripts in ``lua/``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import orjson

from omniq.errors import JobUnreadable
from omniq.jobs.model import UPGRADE, ArtifactInfo, JobRecord, JobSpec, JobState, StageRecord

VALUE, ARTIFACT, MISSING = "v:", "a:", "m:"
#: Fields of a stage that clients see; those in the second set are JSON.
SHOWN = frozenset(StageRecord.model_fields)
JSON = frozenset({"metrics", "error"})
#: States of a job that may go without some outputs.
GOES_WITHOUT = frozenset({JobState.RUNNING, JobState.SUCCEEDED})


@lru_cache(maxsize=4096)
def _place(name: bytes) -> tuple[str, str]:
    """What a field is of, a stage or ``VALUE``, ``ARTIFACT``, ``MISSING`` or '', and its name.

    All jobs of a pipeline have the same fields.
    """
    field = name.decode()
    if (kind := field[:2]) in {VALUE, ARTIFACT, MISSING}:
        return kind, field[2:]
    stage, _, field = field.rpartition("|")
    return stage, field


def read_record(fields: dict[bytes, bytes]) -> JobRecord:
    """The record that a job's hash holds.

    Raises:
        JobUnreadable: another version of omniq has written what this one cannot read.
    """
    return _read(JobSpec.from_json(fields[b"spec"]), fields)


def read_outline(job_id: str, fields: dict[bytes, bytes]) -> JobRecord:
    """What every version writes alike of a job: its states and times. What it was asked for, and
    what it has made, are empty.

    Raises:
        JobUnreadable: as :func:`read_record`, of a state that this version does not know.
    """
    spec = JobSpec.model_construct(
        id=job_id,
        pipeline=fields[b"pipeline"].decode(),
        inputs={},
        parameters={},
        stages=orjson.loads(fields[b"order"]),
        tenant=fields.get(b"tenant", b"").decode(),
        created=float(fields[b"created"]),
    )
    made = {VALUE.encode(), ARTIFACT.encode(), MISSING.encode()}
    return _read(spec, {name: text for name, text in fields.items() if name[:2] not in made})


def _read(spec: JobSpec, fields: dict[bytes, bytes]) -> JobRecord:
    try:
        return _filled(spec, fields)
    except ValueError as exc:  # also pydantic's and orjson's
        raise JobUnreadable(
            f"the job's record is not one of this version of omniq: {exc}", hint=UPGRADE
        ) from exc


def _filled(spec: JobSpec, fields: dict[bytes, bytes]) -> JobRecord:
    stages: dict[str, dict[str, Any]] = {stage: {} for stage in spec.stages}
    values, artifacts, missing = {}, {}, {}
    for name, value in fields.items():
        of, field = _place(name)
        if of in stages:
            if field in JSON:
                stages[of][field] = orjson.loads(value)
            elif field in SHOWN and value:
                stages[of][field] = value.decode()
        elif of == VALUE:
            values[field] = orjson.loads(value)
        elif of == ARTIFACT:
            artifacts[field] = ArtifactInfo.model_validate_json(value)
        elif of == MISSING:
            missing[field] = orjson.loads(value)
    state, error = fields[b"state"].decode(), fields.get(b"error")
    return JobRecord.from_fields(
        {
            "spec": spec,
            "state": state,
            "started": fields.get(b"started"),
            "finished": fields.get(b"finished"),
            "stages": stages,
            "values": values,
            "artifacts": artifacts,
            "missing": missing if state in GOES_WITHOUT else {},
            "error": None if error is None else orjson.loads(error),
        }
    )
