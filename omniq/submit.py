"""Accepting a job: validate it, then record and enqueue it in one step."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Any

from omniq import chain
from omniq.blobs.base import BlobRef
from omniq.config import PipelineConfig, get_pipeline
from omniq.config.request import validate_request
from omniq.errors import InputTooLarge, InvalidRequest
from omniq.inputs import InputFile, read_inputs
from omniq.jobs.model import JobRecord, JobSpec, new_job_id
from omniq.jobs.store import JobStore
from omniq.settings import get_settings

PRIORITIES = range(10)


async def submit(
    store: JobStore,
    *,
    pipeline: str,
    inputs: dict[str, Any],
    parameters: dict[str, Any] | None = None,
    priority: int = 5,
    timeout: float | None = None,
    metadata: dict[str, str] | None = None,
    stream: bool = True,
    awaited: bool = False,
) -> JobRecord:
    """Validate one job, then record and enqueue it in one step: never one without the other.

    ``priority`` 9 is served first, 0 last. A job that has not ended within ``timeout`` seconds
    expires. Pictures and tensors among the inputs become blobs, which the job's end frees. A seed
    that is not given is drawn here, once, so that retries and all stages use the same one.
    With ``stream`` off engines need not say text before it is whole, which costs them less.
    ``awaited``: the caller will wait for the job's end at once (:meth:`JobStore.wait`).

    Raises:
        UnknownPipeline: no such pipeline.
        InvalidRequest: naming every faulty field; of files the first that cannot be used.
        StoreFull, BlobTooLarge: there is no room for a file.
        BrokerUnavailable: the job was neither recorded nor enqueued; or it was both, and the answer
            was lost.
    """
    config = get_pipeline(pipeline)
    spec = make_spec(
        config,
        inputs,
        parameters or {},
        priority=priority,
        timeout=timeout,
        metadata=metadata or {},
        stream=stream,
    )
    if config.files:
        spec = await _with_files(store, config, spec)
    upstream = {s: config.upstream(s) for s in spec.stages}
    return await store.create(spec, upstream, chain.first_posts(spec, config), awaited=awaited)


async def fetch_input(store: JobStore, job_id: str, name: str) -> bytes:
    """A result file that is to be an input of another job.

    Raises:
        JobNotFound, ArtifactNotFound: there is none.
        InputTooLarge: it has more bytes than an input may have, and was not read.
    """
    record = await store.get(job_id)
    info, most = record.artifacts.get(name), get_settings().max_input_bytes
    if info is not None and info.nbytes > most:
        raise InputTooLarge(f"must have at most {most} bytes, has {info.nbytes}")
    return (await store.read_artifact(record, name))[0]


async def _with_files(store: JobStore, config: PipelineConfig, spec: JobSpec) -> JobSpec:
    """The job with its files read and stored as blobs."""

    inputs = await read_inputs(config, spec.inputs, partial(fetch_input, store))
    files: dict[str, BlobRef] = {}
    try:
        for name, value in inputs.items():
            if isinstance(value, InputFile):
                files[name] = await store.put_input(spec.id, name, value.data)
                inputs[name] = value.shown
    except BaseException:
        await store.drop_inputs(files.values())
        raise
    return spec.model_copy(update={"inputs": inputs, "files": files})


def make_spec(
    config: PipelineConfig,
    inputs: dict[str, Any],
    parameters: dict[str, Any],
    *,
    priority: int,
    timeout: float | None,
    metadata: dict[str, str],
    stream: bool = True,
) -> JobSpec:
    """The job a valid request describes, with a new id.

    Raises:
        InvalidRequest: naming every faulty field.
    """
    if isinstance(priority, bool) or priority not in PRIORITIES:
        raise InvalidRequest(
            f"priority: must be 0 to 9; got {priority!r}",
            fields=[{"field": "priority", "message": "must be 0 to 9"}],
        )
    if timeout is not None and not 0 < timeout < float("inf"):
        raise InvalidRequest(
            f"timeout: must be seconds above 0; got {timeout!r}",
            fields=[{"field": "timeout", "message": "must be seconds above 0"}],
        )
    complete = validate_request(config, inputs, parameters)
    seed = secrets.randbelow(2**32)
    for stage in config.stages:
        if "seed" in stage.parameter_model.model_fields:
            complete[stage.stage_id].setdefault("seed", seed)
    created = time.time()
    return JobSpec(
        id=new_job_id(created),
        pipeline=config.name,
        pipeline_version=config.version,
        inputs=inputs,
        parameters=complete,
        stages=config.topological_order(),
        priority=priority,
        deadline=None if timeout is None else created + timeout,
        metadata=metadata,
        stream=stream,
        created=created,
    )
