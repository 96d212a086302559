"""Reading a job's hash; what writes it are the scripts in ``lua/``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import orjson

from omniq.jobs.model import ArtifactInfo, JobRecord, JobSpec, StageRecord

VALUE, ARTIFACT = "v:", "a:"
#: Fields of a stage that clients see; those in the second set are JSON.
SHOWN = frozenset(StageRecord.model_fields)
JSON = frozenset({"metrics", "error"})


@lru_cache(maxsize=4096)
def _place(name: bytes) -> tuple[str, str]:
    """What a field is of, a stage or ``VALUE``, ``ARTIFACT`` or '', and its name there.

    All jobs of a pipeline have the same fields.
    """
    field = name.decode()
    if (kind := field[:2]) in {VALUE, ARTIFACT}:
        return kind, field[2:]
    stage, _, field = field.rpartition("|")
    return stage, field


def read_record(fields: dict[bytes, bytes]) -> JobRecord:
    """The record that a job's hash holds."""
    spec = JobSpec.from_json(fields[b"spec"])
    stages: dict[str, dict[str, Any]] = {stage: {} for stage in spec.stages}
    values, artifacts = {}, {}
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
    error = fields.get(b"error")
    return JobRecord.from_fields(
        {
            "spec": spec,
            "state": fields[b"state"].decode(),
            "started": fields.get(b"started"),
            "finished": fields.get(b"finished"),
            "stages": stages,
            "values": values,
            "artifacts": artifacts,
            "error": None if error is None else orjson.loads(error),
        }
    )
