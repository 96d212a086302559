"""vLLM's engine core in a thread of this process, behind the interface of its process.

Saves the messages between the two processes; worth it where a step is short and cores are few. The
core's Python shares the interpreter with the worker, so a separate process (the default) is better
where there are cores to spare.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from omniq.engines.vllm import contract

logger = logging.getLogger(__name__)

Work = Callable[[], Any]


class InprocCoreClient:
    """What ``AsyncLLM`` needs of vLLM's ``AsyncMPClient``, on a core in a thread.

    Args:
        config: vLLM's ``VllmConfig``.
        executor_class: vLLM's class that runs the model.
        log_stats: whether the core gives statistics.
    """

    def __init__(self, config: Any, executor_class: Any, log_stats: bool, *_: Any, **__: Any):
        self._core: Any = None
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early: list[Any] = []
        #: As ``AsyncLLM`` reads it.
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        started: Future[None] = Future()
        args = (config, executor_class, log_stats, started)
        self._thread = threading.Thread(target=self._run, args=args, name="vllm-core", daemon=True)
        self._thread.start()
        started.result()

    # -- the core's thread -------------------------------------------------------------------

    def _run(
        self, config: Any, executor_class: Any, log_stats: bool, started: Future[None]
    ) -> None:
        try:
            self._core = contract.names().EngineCore(config, executor_class, log_stats)
        except BaseException as exc:
            started.set_exception(exc)
            return
        started.set_result(None)
        try:
            while self._take_work():
                if self._has_work():
                    self._step()
        except Exception as exc:
            logger.exception("vLLM's engine core has died")
            self.resources.engine_dead = True
            self._give(exc)
        finally:
            self._core.shutdown()

    def _has_work(self) -> bool:
        return bool(self._core.scheduler.has_requests() or self._core.batch_queue)

    def _take_work(self) -> bool:
        """Do what was asked for, waiting if there is nothing else; False to end."""
        while True:
            try:
                work = self._work.get(block=not self._has_work())
            except queue.Empty:
                return True
            if work is None:
                return False
            work()

    def _step(self) -> None:
        outputs, executed = self._core.step_fn()
        for output in (outputs or {}).values():
            self._give(output)
        self._core.post_step(executed)
        if not executed and self._core.scheduler.has_requests():
            time.sleep(0.001)  # as vLLM does: something outside of the core must go on first

    def _give(self, output: Any) -> None:
        if self._loop is None:
            self._early.append(output)
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)

    # -- AsyncLLM's side ---------------------------------------------------------------------

    async def get_output_async(self) -> Any:
        """The next step's outputs.

        Raises:
            EngineDeadError: the core has died.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for output in self._early:
                self._outputs.put_nowait(output)
        output = await self._outputs.get()
        if isinstance(output, Exception):
            raise contract.names().EngineDeadError from output
        return output

    async def add_request_async(self, request: Any) -> None:
        """Hand over one request."""

        def add() -> None:
            self._core.add_request(*self._core.preprocess_add_request(request))

        self._do(add)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End requests; their blocks are free after the step that runs now."""
        if request_ids:
            self._do(lambda: self._core.abort_requests(request_ids))

    async def get_supported_tasks_async(self) -> Any:
        """What the model can be used for."""
        return await self.call(lambda core: core.get_supported_tasks())

    async def collective_rpc_async(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a method of the workers."""
        return await self.call(lambda core: core.collective_rpc(method, timeout, args, kwargs))

    async def call(self, function: Callable[[Any], Any]) -> Any:
        """``function`` of the core, between two steps."""
        done: Future[Any] = Future()

        def work() -> None:
            try:
                done.set_result(function(self._core))
            except Exception as exc:
                done.set_exception(exc)

        self._do(work)
        return await asyncio.wrap_future(done)

    def dp_engines_running(self) -> bool:
        """Data parallelism needs processes."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core's thread, within ``timeout`` seconds if it can."""
        self.resources.engine_dead = True
        self._work.put(None)
        self._thread.join(timeout)

    def _do(self, work: Work) -> None:
        if self.resources.engine_dead:
            raise contract.names().EngineDeadError
        self._work.put(work)


@contextlib.contextmanager
def in_process() -> Iterator[None]:
    """Inside, ``AsyncLLM`` gets its engine core in a thread instead of a process.

    The engine's configuration is to be made inside as well: on the CPU it says whether the model
    runs in a process of its own.
    """
    client = contract.names().EngineCoreClient
    kept = client.__dict__["make_async_mp_client"]
    setting = os.environ.get(contract.MULTIPROCESSING)
    os.environ[contract.MULTIPROCESSING] = "0"

    def make(vllm_config: Any, executor_class: Any, log_stats: bool, *_: Any, **__: Any) -> Any:
        return InprocCoreClient(vllm_config, executor_class, log_stats)

    client.make_async_mp_client = staticmethod(make)
    try:
        yield
    finally:
        client.make_async_mp_client = kept
        if setting is None:
            del os.environ[contract.MULTIPROCESSING]
        else:
            os.environ[contract.MULTIPROCESSING] = setting
