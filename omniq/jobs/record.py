"""Reading a job's hash; what writes it are the scripts in ``lua/``."""

from __future__ import annotations

from typing import Any

import orjson

from omniq.jobs.model import (
    ArtifactInfo,
    JobRecord,
    JobSpec,
    JobState,
    StageRecord,
    StageState,
)


def read_record(fields: dict[bytes, bytes]) -> JobRecord:
    """The record that a job's hash holds."""
    raw = {name.decode(): value for name, value in fields.items()}
    spec = JobSpec.model_validate_json(raw["spec"])

    def number(field: str) -> float | None:
        return float(raw[field]) if field in raw else None

    def parsed(field: str) -> Any:
        return orjson.loads(raw[field]) if field in raw else None

    def stage(name: str) -> StageRecord:
        def of(field: str) -> str:
            return f"{name}|{field}"

        worker = raw.get(of("worker"))
        return StageRecord(
            state=StageState(raw[of("state")].decode()),
            attempts=int(raw.get(of("attempts"), 0)),
            worker=worker.decode() if worker else None,
            queued=number(of("queued")),
            started=number(of("started")),
            finished=number(of("finished")),
            step=int(raw[of("step")]) if of("step") in raw else None,
            total=int(raw[of("total")]) if of("total") in raw else None,
            metrics=parsed(of("metrics")) or {},
            error=parsed(of("error")),
        )

    return JobRecord(
        spec=spec,
        state=JobState(raw["state"].decode()),
        started=number("started"),
        finished=number("finished"),
        stages={s: stage(s) for s in spec.stages},
        values={f[2:]: orjson.loads(v) for f, v in raw.items() if f.startswith("v:")},
        artifacts={
            f[2:]: ArtifactInfo.model_validate_json(v) for f, v in raw.items() if f.startswith("a:")
        },
        error=parsed("error"),
    )
