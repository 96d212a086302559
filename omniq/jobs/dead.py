"""Dead letters: jobs that failed for good though nothing was wrong with the request, and those that
succeeded without some outputs because a stage did.

Such a job's record stays for ``OMNIQ_DEAD_LETTER_RETENTION``. It can be tried again: from the stage
that failed if what that reads is still there (values in the record are; tensors are freed with the
failure), else from the last stage whose own inputs are. What came by a queue and is no message at
all lies here, too; it can only be looked at and dropped.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import orjson
from pydantic import BaseModel, Field

from omniq import chain, keys, signing
from omniq.config import PipelineConfig, get_pipeline
from omniq.errors import (
    DeadLetterLost,
    DeadLetterNotFound,
    JobUnreadable,
    PipelineChanged,
    UnknownPipeline,
)
from omniq.jobs.model import JobRecord, JobSpec, StageState
from omniq.jobs.record import read_record
from omniq.jobs.store import JobStore
from omniq.publish import posted
from omniq.redis_client import broker_errors
from omniq.settings import get_settings

#: Ids of what is no message start with this; a job's cannot.
MESSAGE = "message."
SHOWN_CHARS = 2000


class DeadLetter(BaseModel):
    """One job, or one item of a queue, that could not be worked on."""

    id: str = Field(description="The job's id, or 'message.' and a digest.")
    kind: Literal["job", "message"]
    reason: str = Field(
        description="Code of the error; of a message 'undecodable' or 'bad_signature'."
    )
    message: str = Field(description="The error; of a message its beginning.")
    time: float | None = Field(None, description="Unix time; unknown of messages.")
    pipeline: str | None = None
    stage: str | None = Field(None, description="Where it failed.")
    worker: str | None = Field(None, description="Who ran it last.")
    attempts: int | None = None
    deliveries: int | None = None
    traceback: str | None = None
    inputs: dict[str, str] = Field(
        default_factory=dict,
        description="What the stage read: 'stage.output' -> key of its blob, or 'value'.",
    )
    resumes_at: list[str] = Field(
        default_factory=list, description="Stages a retry would begin with; empty: it cannot."
    )


class DeadLetters:
    """Async access; all methods raise BrokerUnavailable when Redis cannot be used."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    async def list(self, limit: int = 50) -> list[DeadLetter]:
        """The newest ones: jobs, then what is no message."""
        redis = self._store.redis
        with broker_errors():
            ids = await redis.zrange(keys.dead_letters(), 0, limit - 1, desc=True)
            pipe = redis.pipeline(transaction=False)
            for job_id in ids:
                pipe.hgetall(keys.job(job_id.decode()))
            rows = await pipe.execute()
            gone = [i for i, row in zip(ids, rows, strict=True) if b"dead" not in row]
            if gone:
                await redis.zrem(keys.dead_letters(), *gone)
            items = await redis.lrange(keys.undecodable(), 0, limit - 1)
        both = zip(ids, rows, strict=True)
        jobs = [_of_job(i.decode(), row) for i, row in both if b"dead" in row]
        return (jobs + [_of_item(item) for item in items])[:limit]

    async def get(self, letter_id: str) -> DeadLetter:
        """One of them.

        Raises:
            DeadLetterNotFound: there is none of that id.
        """
        if letter_id.startswith(MESSAGE):
            return _of_item(await self._item(letter_id))
        return _of_job(letter_id, await self._row(letter_id))

    async def retry(self, letter_id: str) -> JobRecord:
        """Try a job again, without its deadline; returns its record.

        Raises:
            DeadLetterNotFound: there is none of that id.
            DeadLetterLost: it cannot be tried again: no job's, or of a pipeline that is not
                configured any more or has other stages now.
            JobUnreadable: another version of omniq may.
        """
        if letter_id.startswith(MESSAGE):
            raise DeadLetterLost(f"{letter_id} is no job's message; it can only be dropped")
        row = await self._row(letter_id)
        record = read_record(row)
        pipeline, stages = _again(record, row)
        spec: JobSpec = record.spec.model_copy(update={"deadline": None})
        posts = [chain.post_again(spec, pipeline, s) for s in _first(pipeline, stages)]
        revived = await self._store.run_script(
            "revive",
            letter_id,
            [
                orjson.dumps(stages),
                spec.to_json(),
                int(get_settings().job_ttl * 1000),
                *posted(posts),
            ],
            *(p.queue for p in posts),
        )
        if not revived:
            raise _not_found(letter_id)
        return await self._store.get(letter_id)

    async def drop(self, letter_id: str) -> None:
        """Give it up. A job's record stays as long as that of any job.

        Raises:
            DeadLetterNotFound: there is none of that id.
        """
        if letter_id.startswith(MESSAGE):
            item = await self._item(letter_id)
            with broker_errors():
                await self._store.redis.lrem(keys.undecodable(), 1, item)
        elif not await self._store.run_script("drop_dead", letter_id, []):
            raise _not_found(letter_id)

    async def _row(self, job_id: str) -> dict[bytes, bytes]:
        with broker_errors():
            row: dict[bytes, bytes] = await self._store.redis.hgetall(keys.job(job_id))
        if b"dead" not in row:
            raise _not_found(job_id)
        return row

    async def _item(self, letter_id: str) -> bytes:
        with broker_errors():
            items: list[bytes] = await self._store.redis.lrange(keys.undecodable(), 0, -1)
        for item in items:
            if _item_id(item) == letter_id:
                return item
        raise _not_found(letter_id)


def _not_found(letter_id: str) -> DeadLetterNotFound:
    return DeadLetterNotFound(f"no dead letter {letter_id}: unknown, retried, dropped or expired")


def _item_id(item: bytes) -> str:
    return MESSAGE + hashlib.sha256(item).hexdigest()[:16]


def _of_item(item: bytes) -> DeadLetter:
    text = item[:SHOWN_CHARS].decode(errors="replace")
    return DeadLetter(id=_item_id(item), kind="message", reason=_refused_for(item), message=text)


def _refused_for(item: bytes) -> str:
    try:
        message = orjson.loads(item)
        if isinstance(message, dict) and "headers" in message:
            signing.check(message)
    except signing.BadSignature as exc:
        return exc.code
    except orjson.JSONDecodeError:
        pass
    return "undecodable"


def _of_job(job_id: str, row: dict[bytes, bytes]) -> DeadLetter:
    dead = orjson.loads(row[b"dead"])
    stage, details = dead["stage"], dead.get("details") or {}
    try:
        record = read_record(row)
    except JobUnreadable as exc:  # to be tried again by a process of its version
        return DeadLetter(
            id=job_id,
            kind="job",
            reason=exc.code,
            message=exc.message,
            time=dead["time"],
            stage=stage,
            worker=details.get("worker"),
            deliveries=details.get("deliveries"),
        )
    error = record.error or record.stages[stage].error or {}
    try:
        pipeline, stages = _again(record, row)
        first = _first(pipeline, stages)
    except DeadLetterLost:
        first = []
    return DeadLetter(
        id=record.id,
        kind="job",
        reason=str(error.get("code", "")),
        message=str(error.get("message", "")),
        time=dead["time"],
        pipeline=record.spec.pipeline,
        stage=stage,
        worker=details.get("worker"),
        attempts=record.stages[stage].attempts,
        deliveries=details.get("deliveries"),
        traceback=details.get("traceback"),
        inputs=_inputs(record, row, stage),
        resumes_at=first,
    )


def _inputs(record: JobRecord, row: dict[bytes, bytes], stage: str) -> dict[str, str]:
    before: list[str] = orjson.loads(row[b"up"]).get(stage, [])
    found = {
        f"{up}.{name}": str(output["blob"]["id"]) if "blob" in output else "value"
        for up in before
        for name, output in _outputs(row, up).items()
    }
    if not before:
        files = record.spec.files
        found |= {f"input.{n}": files[n].id if n in files else "value" for n in record.spec.inputs}
    return found


def _outputs(row: dict[bytes, bytes], stage: str) -> dict[str, Any]:
    outputs: dict[str, Any] = orjson.loads(row.get(f"{stage}|outputs".encode(), b"{}"))
    return outputs


def _again(record: JobRecord, row: dict[bytes, bytes]) -> tuple[PipelineConfig, list[str]]:
    """The pipeline, and all stages that have to run for the job to succeed, in order.

    Raises:
        DeadLetterLost: the pipeline is not there any more, or has changed.
    """
    stages = record.spec.stages
    try:
        pipeline = chain.served(record.spec, get_pipeline(record.spec.pipeline))
    except (UnknownPipeline, PipelineChanged) as exc:
        raise DeadLetterLost(exc.message) from exc
    again = {n for n, s in record.stages.items() if s.state is not StageState.SUCCEEDED}
    for stage in reversed(stages):
        if stage in again:
            again |= {
                up
                for up in pipeline.upstream(stage)
                if any({"blob", "stream"} & set(output) for output in _outputs(row, up).values())
            }
    return pipeline, [s for s in stages if s in again]


def _first(pipeline: PipelineConfig, stages: list[str]) -> list[str]:
    """Those of ``stages`` that wait for none of the others."""
    return [s for s in stages if not set(pipeline.upstream(s)) & set(stages)]
