"""What is done to a system, each kind by its name."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import redis
from chaos_load import Load
from chaos_processes import STAGES, Processes

from omniq import chain, keys
from omniq.celery import queue_keys
from omniq.config import get_pipeline

#: Turns a list around, in one step.
TURN_AROUND = """
local items = redis.call('LRANGE', KEYS[1], 0, -1)
redis.call('DEL', KEYS[1])
for _, item in ipairs(items) do redis.call('LPUSH', KEYS[1], item) end
return #items
"""
#: A message seen once may be delivered again so much later: the newest so many are remembered.
REMEMBERED = 200

Strike = Callable[[], Awaitable[object]]


class NothingToStrike(Exception):
    """What the fault is for is not there at the moment."""


class Faults:
    """The kinds of faults, and how often each was done."""

    def __init__(self, processes: Processes, load: Load, rng: random.Random) -> None:
        self.processes, self.load, self.rng = processes, load, rng
        self.valkey = processes.valkey
        self.client = redis.Redis(port=self.valkey.port, socket_timeout=5)
        self.done: Counter[str] = Counter()
        self._seen: dict[str, tuple[dict[str, Any], str]] = {}

    @property
    def kinds(self) -> dict[str, tuple[int, Strike]]:
        """By name: how often, relative to the others, and what is done."""
        kinds: dict[str, tuple[int, Strike]] = {
            "worker killed": (5, self.kill_worker),
            "worker stopped": (3, self.stop_worker),
            "engine process killed": (3, self.kill_engine),
            "engine process stopped": (2, self.stop_engine),
            "reconciler's leader killed": (2, self.kill_leader),
            "reconciler's leader stopped": (1, self.stop_leader),
            "API killed": (2, self.kill_api),
            "API stopped": (1, self.stop_api),
            "broker restarted": (1, self.restart_broker),
            "broker killed and restarted": (1, self.kill_broker),
            "broker stopped": (1, self.stop_broker),
            "connections reset": (3, self.reset_connections),
            "broker's memory full": (2, self.fill_memory),
            "clock set": (4, self.set_clock),
            "message delivered twice": (3, self.deliver_twice),
            "old message delivered again": (2, self.deliver_late),
            "messages in reverse order": (2, self.turn_around),
            "message delivered too early": (2, self.deliver_early),
            "queue purged": (2, self.purge),
            "slow consumer": (2, self.read_slowly),
        }
        if self.processes.mount.mounted:
            kinds["shared memory full (ENOSPC)"] = (3, self.fill_shared_memory)
        return kinds

    async def strike(self) -> None:
        """One fault: each kind once, in any order, then by chance."""
        kinds = self.kinds
        names = list(kinds)
        while names:
            left = [n for n in names if not self.done[n]]
            weights = [kinds[n][0] for n in names]
            name = self.rng.choice(left) if left else self.rng.choices(names, weights)[0]
            if await self._do(name, kinds[name][1]):
                return
            names.remove(name)  # another kind, this time

    async def complete(self) -> None:
        """The kinds that there was nothing for, as soon as there is.

        Raises:
            TimeoutError: there was not within a minute.
        """
        async with asyncio.timeout(60):
            while missing := [name for name in self.kinds if not self.done[name]]:
                await self._do(missing[0], self.kinds[missing[0]][1])
                await asyncio.sleep(0.1)

    async def _do(self, name: str, strike: Strike) -> bool:
        """False: there is nothing to do it to."""
        try:
            await strike()
        except (NothingToStrike, redis.ConnectionError, redis.TimeoutError):
            return False
        self.done[name] += 1
        return True

    # -- processes -----------------------------------------------------------------------------

    def _worker(self) -> int:
        return self.rng.choice(list(self.processes.workers().values()))

    def _engine(self) -> int:
        found = self.processes.engines()
        if not found:
            raise NothingToStrike
        return self.rng.choice(found)

    def _leader(self) -> int:
        """Whoever has looked for lost messages last: its name says its process."""
        name = self.client.get(keys.reconciler("chaos"))
        pid = int(name.decode().partition("@")[0].rpartition(".")[2]) if name else 0
        if pid not in self.processes.workers().values():
            raise NothingToStrike
        return pid

    async def kill_worker(self) -> None:
        os.kill(self._worker(), signal.SIGKILL)

    async def stop_worker(self) -> None:
        self.processes.stop(self._worker())

    async def kill_engine(self) -> None:
        os.kill(self._engine(), signal.SIGKILL)

    async def stop_engine(self) -> None:
        self.processes.stop(self._engine())

    async def kill_leader(self) -> None:
        os.kill(self._leader(), signal.SIGKILL)

    async def stop_leader(self) -> None:
        self.processes.stop(self._leader())

    async def kill_api(self) -> None:
        os.kill(self.processes.api, signal.SIGKILL)

    async def stop_api(self) -> None:
        self.processes.stop(self.processes.api)

    # -- the broker ----------------------------------------------------------------------------

    async def restart_broker(self, *, kill: bool = False) -> None:
        await asyncio.to_thread(self.valkey.stop, kill=kill)
        await asyncio.sleep(self.rng.uniform(0, 1))
        await asyncio.to_thread(self.valkey.start)

    async def kill_broker(self) -> None:
        await self.restart_broker(kill=True)

    async def stop_broker(self) -> None:
        assert self.valkey.process is not None
        self.valkey.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self.rng.uniform(0.5, 3.5))
        self.valkey.process.send_signal(signal.SIGCONT)

    async def reset_connections(self) -> None:
        for kind in ("normal", "pubsub"):
            self.client.client_kill_filter(_type=kind, skipme=True)

    async def fill_memory(self) -> None:
        self.client.config_set("maxmemory", "100kb")
        await asyncio.sleep(self.rng.uniform(0.2, 1.5))
        while True:
            try:
                self.client.config_set("maxmemory", "0")
            except redis.ConnectionError:
                await asyncio.sleep(0.1)
            else:
                return

    # -- the host ------------------------------------------------------------------------------

    async def fill_shared_memory(self) -> None:
        ballast = await asyncio.to_thread(self.processes.mount.fill)
        await asyncio.sleep(self.rng.uniform(0.5, 2.5))
        ballast.unlink()

    async def set_clock(self) -> None:
        """Of the API or one worker, by up to two hours either way, or right again."""
        clock = self.rng.choice(list(self.processes.clocks.values()))
        clock.set(0 if clock.ahead and self.rng.random() < 0.4 else self.rng.randint(-7200, 7200))

    # -- messages ------------------------------------------------------------------------------

    def _messages(self) -> list[tuple[dict[str, Any], str]]:
        """What workers hold, or what waits, and the queue that each was in."""
        held = [json.loads(r) for r in self.client.hvals(keys.unacked())]
        queues = [k for s in STAGES for k in queue_keys(keys.stage_queue("chaos", s))]
        found = [(m, rk) for m, _, rk in held]
        found += [
            (json.loads(m), k.split("\x06")[0]) for k in queues for m in self.client.lrange(k, 0, 9)
        ]
        found = [f for f in found if f[0]["headers"].get("task") == "omniq.stage"]
        self._seen.update((m["properties"]["delivery_tag"], (m, rk)) for m, rk in found)
        for tag in list(self._seen)[:-REMEMBERED]:
            del self._seen[tag]
        return found

    def _deliver(self, message: dict[str, Any], queue: str) -> None:
        message = json.loads(json.dumps(message))
        message["properties"]["delivery_tag"] = str(uuid4())
        if self.rng.random() < 0.5:
            message["headers"]["redelivered"] = True
            message["properties"]["delivery_info"]["redelivered"] = True
        self.client.lpush(queue, json.dumps(message))

    async def deliver_twice(self) -> None:
        found = self._messages()
        if not found:
            raise NothingToStrike
        self._deliver(*self.rng.choice(found))

    async def deliver_late(self) -> None:
        """One that was seen at an earlier fault, whatever has become of its job."""
        self._messages()
        if not self._seen:
            raise NothingToStrike
        self._deliver(*self.rng.choice(list(self._seen.values())))

    async def turn_around(self) -> None:
        """The queue with the most messages."""
        names = [k for s in STAGES for k in queue_keys(keys.stage_queue("chaos", s))]
        longest = max(names, key=lambda n: int(self.client.llen(n)))
        if self.client.eval(TURN_AROUND, 1, longest) < 2:
            raise NothingToStrike

    async def deliver_early(self) -> None:
        """The last stage's message of a job whose stages before may not have begun."""
        ids = self.client.zrange(keys.open_jobs("chaos"), 0, -1)
        if not ids:
            raise NothingToStrike
        record = await self.load.store.get(self.rng.choice(ids).decode())
        post = chain.post_again(record.spec, get_pipeline("chaos"), STAGES[-1])
        self.client.lpush(post.queue, post.message)

    async def purge(self) -> None:
        stage = self.rng.choice(STAGES)
        self.client.delete(*queue_keys(keys.stage_queue("chaos", stage)))

    # -- clients -------------------------------------------------------------------------------

    async def read_slowly(self) -> None:
        if not self.load.prompts:
            raise NothingToStrike
        try:
            await self.load.read_slowly(self.rng.choice(list(self.load.prompts)[-20:]))
        except OSError as exc:  # the API is away just now
            raise NothingToStrike from exc
