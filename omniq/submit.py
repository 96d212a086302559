"""Accepting a job: validate it, then record and enqueue it in one step."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from omniq import chain
from omniq.blobs.base import BlobRef
from omniq.config import PipelineConfig, get_pipeline
from omniq.errors import BrokerUnavailable, InputTooLarge, JobNotFound
from omniq.inputs import InputFile, read_inputs
from omniq.job_request import checked_request, refused
from omniq.jobs import webhooks
from omniq.jobs.admission import Admission, Again, refusal
from omniq.jobs.model import JobRecord, JobSpec
from omniq.jobs.store import JobStore
from omniq.settings import get_settings

#: What a client may call a request by which it is known when it comes again.
IDEMPOTENCY_KEY = re.compile(r"^[ -~]{1,255}$")
KEY_RULE = "must be 1 to 255 printable ASCII characters"


async def submit(
    store: JobStore,
    *,
    pipeline: str,
    inputs: dict[str, Any],
    parameters: dict[str, Any] | None = None,
    priority: int | None = None,
    timeout: float | None = None,
    metadata: dict[str, str] | None = None,
    stream: bool = True,
    awaited: bool = False,
    idempotency_key: str | None = None,
    part: tuple[int, int] = (0, 1),
    room_for: int = 1,
    webhook: webhooks.Webhook | None = None,
    outputs: Sequence[str] | None = None,
    allow_partial: bool = False,
    formats: Mapping[str, str] | None = None,
) -> JobRecord:
    """Validate one job, then record and enqueue it in one step: never one without the other.

    ``priority`` 9 is served first, 0 last; unset it is 5, or the highest that the tenant may have.
    A job that has not ended within ``timeout`` seconds expires. Pictures and tensors among the
    inputs become blobs, which the job's end frees. A seed that is not given is drawn here, once, so
    that retries and all stages use the same one.
    Of ``outputs`` the pipeline's others are not made: stages that none of them needs do not run.
    With ``allow_partial`` a stage that fails for good, or has not ended at the deadline, costs only
    the outputs that need it (:attr:`JobRecord.missing`); the job fails if no other is left.
    ``formats`` are those of result files by their output's name, where not the pipeline's.
    With ``stream`` off engines need not say text before it is whole, which costs them less.
    ``awaited``: the caller will wait for the job's end at once (:meth:`JobStore.wait`).
    ``idempotency_key``: a request with the same key and the same content that comes again, at the
    same time or later, is answered with the job of the first (``replayed``).
    ``part``: which of how many jobs of the request with that key this one is, counted from 0.
    ``room_for``: this job is let in only if there is room for so many, itself and others of the
    same request that come at once: a request of several is refused before it has used up anything.
    ``webhook``: is told of the job's end by the API's processes.

    Raises:
        UnknownPipeline: no such pipeline.
        InvalidRequest: naming every faulty field; of files the first that cannot be used.
        Overloaded, ShareUsed: the system, or the tenant's share, has no room for it now.
        IdempotencyConflict: the key was used for something else.
        StoreFull, BlobTooLarge: there is no room for a file.
        BrokerUnavailable: the job was neither recorded nor enqueued; or it was both, and the answer
            was lost.
    """
    if not isinstance(pipeline, str):
        raise refused("pipeline", "must be a name")
    config = get_pipeline(pipeline)
    request = checked_request(
        config,
        inputs,
        {} if parameters is None else parameters,
        priority=priority,
        timeout=timeout,
        metadata=metadata,
        stream=stream,
        share=store.share,
        outputs=outputs,
        allow_partial=allow_partial,
        formats=formats,
    )
    again = None
    if idempotency_key is not None:
        wanted = None if outputs is None else sorted(outputs)
        asked = [pipeline, inputs, parameters or {}, priority, timeout, metadata or {}, wanted]
        asked += [dict(formats)] if formats else []
        asked += ["allow_partial"] if allow_partial else []
        again = _again(idempotency_key, part, asked, webhook)
    # What others compare with is not this host's clock.
    spec = request.job(await store.clock.now())
    hook, nbytes = None, 0
    looks = config.may_name_files
    if again is not None and (looks or webhook is not None):
        # What it names may be gone by now, and its files need no room.
        known = await store.known(again)
        if known is not None:
            return known
    if webhook is not None:
        hook = await webhooks.checked(webhook)
    admission = Admission.of(config)
    if looks:
        if get_settings().remote_media or any(name in spec.inputs for name in config.files):
            await _would_admit(store, spec, admission, room_for)
        spec, nbytes = await _with_files(store, config, spec)
    record: JobRecord | None = None
    try:
        record = await store.create(
            spec,
            {s: config.upstream(s) for s in spec.stages},
            chain.first_posts(spec, config),
            awaited=awaited,
            admission=admission,
            again=again,
            hook=hook,
            room_for=room_for,
        )
    finally:
        if spec.files and (record is None or record.replayed):
            await _drop_unless_created(store, spec, nbytes)
    return record


def _again(
    key: str, part: tuple[int, int], asked: Sequence[Any], webhook: webhooks.Webhook | None
) -> Again:
    if not isinstance(key, str) or not IDEMPOTENCY_KEY.fullmatch(key):
        raise refused("idempotency_key", KEY_RULE)

    def plain(value: Any) -> Any:
        data = value.data if isinstance(value, InputFile) else bytes(value)
        return hashlib.sha256(data).hexdigest()

    options = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS
    hook = None if webhook is None else webhook.model_dump()
    content = orjson.dumps((*asked, hook, part), default=plain, option=options)
    known_by = hashlib.sha256(key.encode()).hexdigest()
    return Again(
        key=f"{known_by}:{part[0]}" if part[0] else known_by,
        print=hashlib.sha256(content).hexdigest(),
    )


async def _drop_unless_created(store: JobStore, spec: JobSpec, nbytes: int) -> None:
    """Free the files of a job that was not created; one whose answer was lost may have been."""
    try:
        await store.get(spec.id)
    except JobNotFound:
        await store.inputs.drop(spec.id, nbytes, spec.files.values())
    except BrokerUnavailable:
        return  # they are dropped when an unfinished job is


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


async def _would_admit(store: JobStore, spec: JobSpec, admission: Admission, room_for: int) -> None:
    """Refuse a job before anything is done for its files: fetched, decoded, written.

    Raises:
        Overloaded, ShareUsed: it would be refused in the end.
    """
    ask, ttl = admission.ask(spec, store.share, room_for=room_for), get_settings().job_ttl
    if answer := await store.run_script("would_admit", spec.id, [ask, int(ttl * 1000)]):
        refused = refusal(answer)
        store.usage = store.share.after(refused)
        raise refused


async def _with_files(
    store: JobStore, config: PipelineConfig, spec: JobSpec
) -> tuple[JobSpec, int]:
    """The job with its files read and stored as blobs, and their bytes."""
    inputs = await read_inputs(config, spec.inputs, partial(fetch_input, store))
    found = {name: v for name, v in inputs.items() if isinstance(v, InputFile)}
    nbytes = sum(len(file.data) for file in found.values())
    if not found:  # a conversation's may have been brought in all the same
        return spec.model_copy(update={"inputs": inputs}), 0
    await store.inputs.reserve(spec.id, config.name, nbytes)
    files: dict[str, BlobRef] = {}
    try:
        for name, file in found.items():
            files[name] = await store.inputs.put(spec.id, name, file.data)
            inputs[name] = file.shown
    except BaseException:
        await store.inputs.drop(spec.id, nbytes, files.values())
        raise
    return spec.model_copy(update={"inputs": inputs, "files": files}), nbytes
