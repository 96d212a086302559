"""Engine.in_thread: cancellation never lets two requests compute at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

import pytest

from omniq.config import OmniStageConfig
from omniq.engines.base import Emit, Engine, StageInput, StageOutput, StageRequest


class Idle(Engine):
    name = "idle"

    async def load(self) -> None:
        pass

    async def warmup(self) -> None:
        pass

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        return StageOutput()


@pytest.fixture
async def engine():
    config = OmniStageConfig(stage_id="s", engine_type="AR", model="none")
    engine = Idle(config)
    yield engine
    await engine.unload()


async def test_cancelled_call_ends_only_when_its_thread_has_stopped(engine: Engine) -> None:
    """Even a second cancel does not make the waiter leave a running function behind."""
    running, cancel, release, ended = (threading.Event() for _ in range(4))

    def work() -> None:
        running.set()
        cancel.wait(10)
        release.wait(10)
        ended.set()

    task = asyncio.create_task(engine.in_thread(work, cancel=cancel))
    await asyncio.to_thread(running.wait, 10)
    task.cancel()
    await asyncio.to_thread(cancel.wait, 10)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_cancelled_call_in_the_queue_never_runs(engine: Engine) -> None:
    running, release, ran = (threading.Event() for _ in range(3))

    def block() -> None:
        running.set()
        release.wait(10)

    first = asyncio.create_task(engine.in_thread(block))
    await asyncio.to_thread(running.wait, 10)
    second = asyncio.create_task(engine.in_thread(ran.set))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    release.set()
    await first
    await engine.in_thread(int)
    assert not ran.is_set()
