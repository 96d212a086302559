"""Requests from asyncio programs, straight to the job store and the broker (no HTTP)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from omniq.config import PipelineConfig, available_pipelines, get_pipeline
from omniq.config.request import validate_request
from omniq.errors import BrokerUnavailable, ConfigError, OmniqError, Overloaded
from omniq.inputs import read_inputs
from omniq.job_request import merged
from omniq.jobs.model import JobEvent, JobRecord
from omniq.jobs.store import JobStore
from omniq.jobs.webhooks import Webhook
from omniq.jobs.workers import WorkerRegistry
from omniq.request_output import Artifact, OmniRequestOutput
from omniq.runtime.binding import bind, unbind
from omniq.runtime.local import LocalSystem
from omniq.runtime.private_broker import PrivateBroker
from omniq.runtime.ready import readiness
from omniq.settings import get_settings
from omniq.submit import fetch_input, submit

logger = logging.getLogger(__name__)

Prompt = str | Mapping[str, Any]
"""A text for the pipeline's first input, or all inputs by name.

A picture is a PIL image, a path, a file's bytes, an array uint8 [H, W, 3], a data URL, an
:class:`~omniq.request_output.Artifact` or ``{"job": ID, "artifact": NAME}``; sound and videos are
the same, their arrays float32 [samples] (at the input's rate) and uint8 [frames, H, W, 3]; latents
are an array, a torch tensor or a safetensors file.
"""

BLOCK = 1.0
"""Seconds between looks at the processes while nothing happens."""
PATIENCE = 30.0
"""Seconds a broker may be away while a result is awaited: jobs outlive its restart."""
HANGS = 10.0
"""Seconds after which a broker that does not answer has been noticed for certain."""
MODEL_OPTIONS = ("engine", "engine_args", "encoder", "gpus", "stage_overrides")
"""What may be said of a model, by the names of ``omniq serve``'s flags."""
POLL = 0.2
"""Seconds between tries while the broker is away."""
LONGEST_WAIT = 5.0
"""Seconds after which one who waits for room asks again at the latest."""
MAX_SUBMITS = 16
"""Requests being published at the same time."""
MAX_READS = 4
"""Of these, those whose files are in memory."""


def _pipeline(
    name: str, broker_url: str | None, model_options: Mapping[str, Any]
) -> PipelineConfig:
    if unknown := sorted(set(model_options) - set(MODEL_OPTIONS)):
        raise TypeError(f"unknown argument {unknown[0]!r}; of a model: {', '.join(MODEL_OPTIONS)}")
    is_model = name not in available_pipelines() and ("/" in name or Path(name).exists())
    if not (is_model or model_options):
        return get_pipeline(name)
    if broker_url is not None or not (get_settings().embedded or PrivateBroker.in_use()):
        raise ConfigError(
            f"{name}: a running system serves the pipelines it was started with",
            hint="start it by `omniq serve MODEL`, and name its pipeline here, whose file (in "
            "OMNIQ_DATA_DIR/serve) is to be in OMNIQ_PIPELINES",
        )
    from omniq.serve.in_process import model_pipeline  # noqa: PLC0415 - slow import

    return model_pipeline(name, model_options)


class AsyncOmniLLM:
    """Requests to one pipeline, for asyncio.

    ``async with AsyncOmniLLM() as llm: output = await llm.generate("a red circle")``

    Uses the running system when ``broker_url`` or ``OMNIQ_BROKER_URL`` names one; else it starts a
    :class:`~omniq.runtime.local.LocalSystem` of its own and stops it on :meth:`close`.

    Args:
        pipeline: name of an available pipeline; or a model's folder or hub name, which is then
            resolved as by ``omniq serve``, for a system of its own.
        broker_url: Redis or Valkey of a running system.
        devices: of the workers it starts itself, by stage id.
        ready_timeout: seconds they may take to get ready; default ``OMNIQ_READY_TIMEOUT``.
        on_progress: called with stage and state while they start.
        model_options: of a model: ``engine``, ``engine_args``, ``encoder``, ``gpus`` and
            ``stage_overrides``, as the flags of ``omniq serve``.

    Raises:
        UnknownPipeline: there is no such pipeline.
        ConfigError: the model cannot be served so, or a running system is to be used, which
            serves the pipelines that it was started with.
    """

    def __init__(
        self,
        pipeline: str = "tiny-omni",
        *,
        broker_url: str | None = None,
        devices: Mapping[str, Sequence[str]] | None = None,
        ready_timeout: float | None = None,
        on_progress: Callable[[str, str], None] | None = None,
        **model_options: Any,
    ) -> None:
        self.config = _pipeline(pipeline, broker_url, model_options)
        self._broker_url = broker_url
        self._system_options: dict[str, Any] = {
            "devices": devices,
            "ready_timeout": ready_timeout,
            "on_progress": on_progress,
        }
        self._system: LocalSystem | None = None
        self._store: JobStore | None = None
        self._bound = False
        self._starting = asyncio.Lock()
        self._submits = asyncio.Semaphore(MAX_READS if self.config.files else MAX_SUBMITS)

    async def start(self) -> None:
        """Connect, or start the system; the other methods do it by themselves.

        Raises:
            NotReady: the own system did not get ready; says why.
            BrokerUnavailable: the running system's broker does not answer.
        """
        async with self._starting:
            if self._store is not None:
                return
            try:
                await self._start()
            except BaseException:
                await self._stop()
                raise

    async def _start(self) -> None:
        if self._broker_url is not None:
            bind(self._broker_url)
            self._bound = True
        elif get_settings().embedded or PrivateBroker.in_use():
            self._system = LocalSystem(self.config.name, **self._system_options)
            await asyncio.to_thread(self._system.start)
        self._store = JobStore.from_settings()
        if self._system is None:
            registry = WorkerRegistry(self._store.redis)
            for stage in await readiness(registry, self.config):
                if not stage.ready:
                    logger.warning(
                        "%s: no ready worker for stage %s; jobs wait until there is one",
                        self.config.name,
                        stage.stage,
                    )

    async def close(self) -> None:
        """Disconnect; stop what was started. Jobs on a running system go on."""
        async with self._starting:
            await self._stop()

    async def _stop(self) -> None:
        store, self._store = self._store, None
        system, self._system = self._system, None
        if store is not None:
            await store.close()
        if system is not None:
            await asyncio.to_thread(system.close)
        if self._bound:
            self._bound = False
            unbind()

    async def __aenter__(self) -> AsyncOmniLLM:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        parameters: Mapping[str, Any] | None = None,
        *,
        raise_on_error: bool = True,
        priority: int = 5,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        outputs: Sequence[str] | None = None,
        allow_partial: bool = False,
        formats: Mapping[str, str] | None = None,
        **more: Any,
    ) -> OmniRequestOutput:
        """Serve one request; cancelling this call cancels the job.

        Args:
            parameters, more: the pipeline's parameters (``seed=1, num_inference_steps=20``).
            timeout: seconds within which the job must have ended, else it expires.
            idempotency_key: as in :meth:`submit`; with it the job goes on when the call is
                cancelled.
            outputs: only these of the pipeline's; stages that none of them needs do not run.
            allow_partial: a stage that fails for good, or has not ended at the deadline, costs only
                the outputs that need it; the result is ``partial`` then, and says what is
                ``missing``.
            formats: of files by output (``{"audio": "mp3"}``), where not the pipeline's.

        Raises:
            InvalidRequest: naming every faulty field.
            Overloaded: the system has no room for it now; ``retry_after`` says when.
            JobFailed: the job failed, expired or was cancelled (if ``raise_on_error``).
            NotReady: a process of the own system has ended.
            BrokerUnavailable: the broker cannot be reached.
        """
        job_id = await self._submit(
            prompt,
            merged(parameters, more),
            priority=priority,
            timeout=timeout,
            stream=False,
            awaited=True,
            idempotency_key=idempotency_key,
            outputs=outputs,
            allow_partial=allow_partial,
            formats=formats,
        )
        try:
            return await self.result(job_id, raise_on_error=raise_on_error)
        except asyncio.CancelledError:
            if idempotency_key is None:
                await self.cancel(job_id)
            raise

    async def stream(
        self,
        prompt: Prompt,
        parameters: Mapping[str, Any] | None = None,
        *,
        raise_on_error: bool = True,
        priority: int = 5,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        outputs: Sequence[str] | None = None,
        allow_partial: bool = False,
        formats: Mapping[str, str] | None = None,
        **more: Any,
    ) -> AsyncIterator[OmniRequestOutput]:
        """As :meth:`generate`, yielding the output as it grows; the last one is finished.

        It is one object that is brought up to date: text so far, each stage's ``step`` of
        ``total``, ``previews`` if ``preview_every`` asks for them. Leaving the loop early and
        closing the iterator cancels the job, unless it has an idempotency key.
        """
        job_id = await self.submit(
            prompt,
            parameters,
            priority=priority,
            timeout=timeout,
            outputs=outputs,
            allow_partial=allow_partial,
            formats=formats,
            idempotency_key=idempotency_key,
            **more,
        )
        finished = idempotency_key is not None
        try:
            output = await self.poll(job_id)
            async for event in self._events(job_id):
                if output.apply(event):
                    yield output
            final = await self.poll(job_id)
            finished = True
            if raise_on_error:
                final.raise_for_state()
            yield final
        finally:
            if not finished:
                await self.cancel(job_id)

    generate_stream = stream

    async def submit(
        self,
        prompt: Prompt,
        parameters: Mapping[str, Any] | None = None,
        *,
        priority: int = 5,
        timeout: float | None = None,
        metadata: dict[str, str] | None = None,
        stream: bool = True,
        idempotency_key: str | None = None,
        webhook: Webhook | None = None,
        patient: bool = False,
        outputs: Sequence[str] | None = None,
        allow_partial: bool = False,
        formats: Mapping[str, str] | None = None,
        part: tuple[int, int] = (0, 1),
        **more: Any,
    ) -> str:
        """Enqueue one request and return its job id; it runs whether or not anybody waits.

        Args:
            stream: whether its events shall tell pieces of text before the whole is there, which
                costs an engine a little for each.
            idempotency_key: a request with the same key and content that comes again is the same
                job, however often it is sent.
            webhook: is told of the job's end by the processes of the API.
            patient: wait for room as long as the system has none.
            outputs, allow_partial, formats: as of :meth:`generate`.
            part: which of how many requests with that key this one is, counted from 0.

        Raises:
            InvalidRequest, Overloaded, BrokerUnavailable: as :meth:`generate`.
            IdempotencyConflict: the key was used for something else.
        """
        return await self._submit(
            prompt,
            merged(parameters, more),
            priority=priority,
            timeout=timeout,
            metadata=metadata,
            stream=stream,
            idempotency_key=idempotency_key,
            webhook=webhook,
            patient=patient,
            outputs=outputs,
            allow_partial=allow_partial,
            formats=formats,
            part=part,
        )

    async def _submit(
        self,
        prompt: Prompt,
        parameters: dict[str, Any],
        *,
        patient: bool = False,
        **options: Any,
    ) -> str:
        store = await self._connected()
        # One that waits for room keeps its place, and its files, so that no others are read.
        async with self._submits:
            # Without files there is nothing to read, and what follows checks the rest.
            files = self.config.files
            inputs = await self.prepare(prompt, parameters) if files else self._inputs(prompt)
            while True:
                try:
                    return await self._sent(
                        submit(
                            store,
                            pipeline=self.config.name,
                            inputs=inputs,
                            parameters=parameters,
                            **options,
                        )
                    )
                except Overloaded as exc:
                    if not patient:
                        raise
                    if self._system is not None:
                        self._system.check()
                    await asyncio.sleep(min(max(exc.retry_after, POLL), LONGEST_WAIT))

    async def _sent(self, submission: Coroutine[Any, Any, JobRecord]) -> str:
        """Id of the job; a caller that is cancelled at this very moment leaves none behind."""
        sending = asyncio.create_task(submission)
        try:
            return (await asyncio.shield(sending)).id
        except asyncio.CancelledError:
            try:
                record = await sending
                if not record.replayed:
                    await self.cancel(record.id)
            except OmniqError as exc:
                logger.warning("a request that was cancelled while it was sent: %s", exc)
            raise

    async def poll(self, job_id: str) -> OmniRequestOutput:
        """What is known of a job now, with its result files once it has succeeded.

        Raises:
            JobNotFound: unknown, or no longer kept.
        """
        store = await self._connected()
        return await self._output(await store.get(job_id))

    async def result(self, job_id: str, *, raise_on_error: bool = True) -> OmniRequestOutput:
        """Wait until a job has ended.

        Raises:
            JobNotFound, JobFailed, NotReady, BrokerUnavailable: as :meth:`generate`.
        """
        output = await self._output(await self._ended(job_id))
        if raise_on_error:
            output.raise_for_state()
        return output

    async def cancel(self, job_id: str) -> OmniRequestOutput:
        """Ask a job to stop; one that has ended stays as it is.

        Raises:
            JobNotFound: unknown, or no longer kept.
        """
        store = await self._connected()
        return await self._output(await store.cancel(job_id))

    def validate(self, prompt: Prompt, parameters: Mapping[str, Any]) -> None:
        """Check a request without sending it or reading its files.

        Raises:
            InvalidRequest: naming every faulty field.
        """
        validate_request(self.config, self._inputs(prompt), dict(parameters))

    async def prepare(self, prompt: Prompt, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Check a request and read its pictures and tensors; the result serves as a prompt.

        Raises:
            InvalidRequest: naming every faulty field; of files the first that cannot be used.
            BrokerUnavailable: a result of another job cannot be read.
        """
        self.validate(prompt, parameters)
        return await read_inputs(self.config, self._inputs(prompt), self._fetch, local=True)

    async def _fetch(self, job_id: str, name: str) -> bytes:
        return await fetch_input(await self._connected(), job_id, name)

    def _inputs(self, prompt: Prompt) -> dict[str, Any]:
        if isinstance(prompt, Mapping):
            return dict(prompt)
        return {next(iter(self.config.inputs)): prompt}

    async def _connected(self) -> JobStore:
        if self._store is None:
            await self.start()
        assert self._store is not None
        return self._store

    async def _output(self, record: JobRecord) -> OmniRequestOutput:
        store = await self._connected()
        artifacts: dict[str, Artifact] = {}
        if record.state.final:
            for name, info in record.artifacts.items():
                if info.is_chunk:  # the whole is there too
                    continue
                data, _ = await store.read_artifact(record, name)
                artifacts[name] = Artifact(name, info.content_type, data, info.meta)
        return OmniRequestOutput.from_record(record, self.config, artifacts)

    async def _events(self, job_id: str) -> AsyncIterator[JobEvent]:
        """The job's events up to the final one, across restarts of the broker."""
        store = await self._connected()
        last, patience = "0", _Patience()
        while True:
            try:
                async for event in store.events(job_id, last, block=BLOCK):
                    patience.renew()
                    if event is not None:
                        last = event.id
                        yield event
                    elif self._system is not None:
                        self._system.check()
                return
            except BrokerUnavailable as exc:
                await patience.wait(exc)

    async def _ended(self, job_id: str) -> JobRecord:
        """The record of a job that has ended, across restarts of the broker."""
        store, patience = await self._connected(), _Patience()
        began = float("-inf")
        while True:
            if self._system is not None:
                self._system.check()
            if time.monotonic() - began > HANGS:  # the last try has waited, not hung
                patience.renew()
            began = time.monotonic()
            waiting = asyncio.create_task(store.wait(job_id))
            try:
                while not (await asyncio.wait({waiting}, timeout=BLOCK))[0]:
                    if self._system is not None:
                        self._system.check()
                record = waiting.result()
            except BrokerUnavailable as exc:
                if self._system is not None:
                    self._system.check()
                await patience.wait(exc)
            else:
                if record.state.final:
                    return record
            finally:
                waiting.cancel()


class _Patience:
    """How long a broker that is away is waited for."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._until = time.monotonic() + PATIENCE

    async def wait(self, error: BrokerUnavailable) -> None:
        """Pause before the next try; raises ``error`` when the time is up."""
        if time.monotonic() > self._until:
            raise error
        await asyncio.sleep(POLL)
