"""Runs side by side, and suspects alone."""

from __future__ import annotations

import asyncio

import pytest
from omniq_workers.isolation import Isolation


class Runs:
    """Runs that note when they begin and end when told to."""

    def __init__(self) -> None:
        self.isolation = Isolation()
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.end: dict[str, asyncio.Event] = {}

    async def start(self, name: str, *, alone: bool = False) -> None:
        self.end[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, alone))
        await self.settle()

    async def _run(self, name: str, alone: bool) -> None:
        await self.isolation.enter(alone=alone)
        self.inside.append(name)
        try:
            await self.end[name].wait()
        finally:
            self.inside.remove(name)
            self.isolation.leave()

    async def stop(self, name: str) -> None:
        self.end[name].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_who_is_to_be_alone_is_and_does_not_starve() -> None:
    runs = Runs()
    await runs.start("a")
    await runs.start("b")
    await runs.start("suspect", alone=True)
    await runs.start("late")
    assert runs.inside == ["a", "b"]
    await runs.stop("a")
    assert runs.inside == ["b"]
    await runs.stop("b")
    assert runs.inside == ["suspect"]
    await runs.start("other suspect", alone=True)
    await runs.stop("suspect")
    assert runs.inside == ["other suspect"]
    await runs.stop("other suspect")
    assert runs.inside == ["late"]


async def test_who_waits_to_be_alone_and_is_cancelled_holds_nobody_up() -> None:
    runs = Runs()
    await runs.start("a")
    await runs.start("suspect", alone=True)
    await runs.start("b")
    runs.tasks["suspect"].cancel()
    await runs.settle()
    assert runs.inside == ["a", "b"]


@pytest.mark.parametrize("alone", [False, True])
async def test_nothing_begins_once_the_engine_is_dead(alone: bool) -> None:
    runs = Runs()
    await runs.start("suspect", alone=True)
    await runs.start("b", alone=alone)
    runs.isolation.close()
    await runs.stop("suspect")
    assert runs.inside == []
    runs.tasks["b"].cancel()
    await runs.settle()
    assert runs.tasks["b"].cancelled()
