"""The Python front door: :class:`OmniLLM` for scripts, :class:`AsyncOmniLLM` for asyncio."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, TypeVar

from omniq.async_client import AsyncOmniLLM, Prompt
from omniq.errors import ConfigError, InvalidRequest, JobFailed, OmniqError
from omniq.job_request import merged
from omniq.jobs.model import JobState
from omniq.request_output import OmniRequestOutput

__all__ = ["AsyncOmniLLM", "OmniLLM", "OmniRequestOutput", "Prompt"]

T = TypeVar("T")
logger = logging.getLogger(__name__)

INTERRUPT_GRACE = 10.0
"""Seconds an interrupted call may take to cancel its jobs."""
MAX_WAITS = 256
"""Jobs of one call that are waited for at the same time."""


class OmniLLM:
    """Requests to one pipeline, for plain scripts and notebooks.

    ``with OmniLLM() as llm: outputs = llm.generate(["a red circle", "a blue square"], seed=1)``

    The system is connected to, or started, at once. Arguments as :class:`AsyncOmniLLM`.

    Raises:
        NotReady, BrokerUnavailable: as :meth:`AsyncOmniLLM.start`.
    """

    def __init__(self, pipeline: str = "tiny-omni", **options: Any) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="omniq-client", daemon=True
        )
        self._thread.start()
        try:
            self._llm = AsyncOmniLLM(pipeline, **options)
            self._call(self._llm.start())
        except BaseException:
            self._stop_loop()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        raise_on_error: bool = True,
        priority: int = 5,
        timeout: float | None = None,
        idempotency_key: str | None = None,
        outputs: Sequence[str] | None = None,
        allow_partial: bool = False,
        formats: Mapping[str, str] | None = None,
        **more: Any,
    ) -> list[OmniRequestOutput]:
        """Serve all prompts, submitted at once so that the stages overlap; results in their order.

        Nothing is submitted if any request is invalid. Files are read as their requests are
        submitted, a few at a time; one that cannot be used cancels the jobs before it. While the
        system has no room for more, the rest waits. All jobs are waited for, also when one fails;
        Ctrl-C cancels those that have not ended.

        Args:
            parameters: for all prompts, or one mapping for each.
            outputs: only these of the pipeline's; stages that none of them needs do not run.
            allow_partial: as of :meth:`AsyncOmniLLM.generate`.
            formats: of files by output (``{"audio": "mp3"}``), where not the pipeline's.
            more: parameters for all prompts; they win over ``parameters``.
            idempotency_key: as of :meth:`AsyncOmniLLM.submit`, of the call: each prompt has its own
                by its number.

        Raises:
            InvalidRequest: naming the faulty fields.
            JobFailed: the first job that failed; ``details["failed"]`` lists their ids.
            NotReady, BrokerUnavailable: as :meth:`AsyncOmniLLM.generate`.
        """
        requests = _requests(prompts, parameters, more)
        options = {
            "priority": priority,
            "timeout": timeout,
            "outputs": outputs,
            "allow_partial": allow_partial,
            "formats": formats,
        }
        made = self._call(self._generate(requests, idempotency_key, options))
        failed = [o for o in made if o.state is not JobState.SUCCEEDED]
        if failed and raise_on_error:
            try:
                failed[0].raise_for_state()
            except JobFailed as exc:
                exc.details["failed"] = [o.job_id for o in failed]
                raise
        return made

    async def _generate(
        self,
        requests: list[tuple[Prompt, dict[str, Any]]],
        key: str | None,
        options: dict[str, Any],
    ) -> list[OmniRequestOutput]:
        llm = self._llm
        for prompt, parameters in requests:
            llm.validate(prompt, parameters)
        submits = [
            asyncio.create_task(
                llm.submit(
                    prompt,
                    parameters,
                    stream=False,
                    idempotency_key=key,
                    part=(number, len(requests)),
                    patient=True,
                    **options,
                )
            )
            for number, (prompt, parameters) in enumerate(requests)
        ]
        try:
            job_ids = await asyncio.gather(*submits)
            return await _results(llm, job_ids)
        except BaseException:
            await _cancel_all(llm, submits)
            raise

    def close(self) -> None:
        """Disconnect, and stop the system if this object started it."""
        if self._loop.is_closed() or os.getpid() != self._pid:
            return
        try:
            self._call(self._llm.close())
        finally:
            self._stop_loop()

    def __enter__(self) -> OmniLLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the client's loop; Ctrl-C cancels it and waits for its clean-up."""
        try:
            self._check_usable()
        except OmniqError:
            work.close()
            raise
        task: Future[asyncio.Task[T]] = Future()

        async def run() -> T:
            task.set_result(asyncio.ensure_future(work))
            return await task.result()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(task.result().cancel)
            wait([future], INTERRUPT_GRACE)
            raise

    def _check_usable(self) -> None:
        if self._loop.is_closed():
            raise ConfigError("this OmniLLM is closed", hint="make a new one")
        if os.getpid() != self._pid:
            raise ConfigError(
                "this OmniLLM belongs to the process that made it, not to a fork of it",
                hint="make one in each process, or start processes with the 'spawn' method",
            )

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def _requests(
    prompts: Prompt | Sequence[Prompt],
    parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    more: Mapping[str, Any],
) -> list[tuple[Prompt, dict[str, Any]]]:
    for name, value in (("prompts", prompts), ("parameters", parameters)):
        if not isinstance(value, str | Mapping | Sequence) and (value, name) != (
            None,
            "parameters",
        ):
            message = f"must be one, or a list of them, not {type(value).__name__}"
            raise InvalidRequest(f"{name}: {message}", fields=[{"field": name, "message": message}])
    listed: list[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
    if parameters is None or isinstance(parameters, Mapping):
        each: list[Mapping[str, Any]] = [parameters or {}] * len(listed)
    else:
        each = list(parameters)
    if len(each) != len(listed):
        message = f"must be one for all, or one for each of the {len(listed)} prompts"
        raise InvalidRequest(
            f"parameters: {message}; got {len(each)}",
            fields=[{"field": "parameters", "message": message}],
        )
    return [(p, merged(q, more)) for p, q in zip(listed, each, strict=True)]


async def _results(llm: AsyncOmniLLM, job_ids: Sequence[str]) -> list[OmniRequestOutput]:
    """What became of the jobs, in their order; so many at a time are waited for side by side."""
    places = asyncio.Semaphore(MAX_WAITS)

    async def one(job_id: str) -> OmniRequestOutput:
        async with places:
            return await llm.result(job_id, raise_on_error=False)

    waits = [asyncio.create_task(one(job_id)) for job_id in job_ids]
    try:
        return await asyncio.gather(*waits)
    except BaseException:
        for wait_ in waits:
            wait_.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        raise


async def _cancel_all(llm: AsyncOmniLLM, submits: list[asyncio.Task[str]]) -> None:
    """Cancel the jobs of a batch that nobody will wait for; the batch's own error matters more."""
    for submit in submits:
        submit.cancel()
    for outcome in await asyncio.gather(*submits, return_exceptions=True):
        if isinstance(outcome, str):
            try:
                await llm.cancel(outcome)
            except OmniqError as exc:
                logger.warning("job %s could not be cancelled: %s", outcome, exc)
