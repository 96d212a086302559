"""The load on a system: jobs with every kind of prompt, cancellations, and slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine

import httpx
from chaos_processes import Processes

from omniq.errors import OmniqError
from omniq.jobs.store import JobStore
from omniq.submit import submit

#: Seconds that every fifth job has: no fault takes as long, but a clock that is set goes further.
TIMEOUT = 3000.0
#: So long a slow reader waits between two pieces of an event stream, and how often.
SLOW, PIECES = 0.25, 12


class Load:
    """Submits jobs, and knows what was asked of each.

    Args:
        trouble: of how many jobs one kills its worker, one its engine process, and one fails at
            first.
        poison: of how many jobs one kills every engine process, one is invalid, one always fails.
    """

    def __init__(
        self, processes: Processes, rng: random.Random, *, trouble: int, poison: int
    ) -> None:
        self.processes, self.rng = processes, rng
        self.trouble, self.poison = trouble, poison
        self.store = JobStore.from_settings()
        self.accepted = self.refused = self.cut_off = self.read_to_the_end = 0
        self.prompts: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.wrong: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def _prompt(self, number: int) -> str:
        prompt = f"job {number} of {self.rng.random()}"
        for at, words in enumerate(("die=1", "dead=1", "oom=2")):
            if number % self.trouble == 7 + at:
                return f"{prompt} {words}"
        for at, words in enumerate(("invalid", "error", "kill")):
            if number % self.poison == 17 + at:
                return f"{prompt} poison={words}"
        return prompt

    async def feed(self, jobs: int, seconds: float) -> None:
        """Submit that many jobs in about that time, by HTTP and by Python in turn."""
        began = time.monotonic()
        async with httpx.AsyncClient(timeout=5) as http:
            for number in range(jobs):
                await self.add(http, number)
                due = began + seconds * (number + 1) / jobs
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def add(self, http: httpx.AsyncClient, number: int) -> str:
        """Have one job accepted, however often it takes; its id."""
        prompt = self._prompt(number)
        timeout = TIMEOUT if number % 5 == 1 else None
        job_id = await self._accepted(http, prompt, timeout, number % 2 == 0)
        self.prompts[job_id] = prompt
        self.accepted += 1
        if number % 10 == 3 and "poison" not in prompt:
            self.cancelled.add(job_id)
            self._start(self._cancel(job_id, self.rng.uniform(0, 0.5)))
        return job_id

    async def _accepted(
        self, http: httpx.AsyncClient, prompt: str, timeout: float | None, by_http: bool
    ) -> str:
        asked = {"pipeline": "chaos", "input": {"prompt": prompt}}
        while True:
            try:
                if not by_http:
                    record = await submit(
                        self.store, pipeline="chaos", inputs={"prompt": prompt}, timeout=timeout
                    )
                    return record.id
                answer = await http.post(
                    f"http://127.0.0.1:{self.processes.api_port}/v1/jobs",
                    json=asked if timeout is None else {**asked, "timeout": timeout},
                )
                if answer.status_code == 202:
                    return str(answer.json()["id"])
                if answer.status_code != 503:
                    self.wrong.append(f"submission: {answer.status_code} {answer.text}")
            except (OmniqError, httpx.HTTPError):
                pass
            self.refused += 1
            await asyncio.sleep(0.2)

    async def _cancel(self, job_id: str, after: float) -> None:
        await asyncio.sleep(after)
        while True:
            try:
                await self.store.cancel(job_id)
            except OmniqError:
                await asyncio.sleep(0.3)
            else:
                return

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- slow readers --------------------------------------------------------------------------

    async def read_slowly(self, job_id: str) -> None:
        """Follow a job's events a few bytes at a time, then to their end.

        Raises:
            OSError: the API is not there.
        """
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.processes.api_port, limit=256
        )
        writer.write(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        self._start(self._read(reader, writer, job_id))

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, job_id: str
    ) -> None:
        said = b""
        try:
            for _ in range(PIECES):
                said += await reader.read(16)
                await asyncio.sleep(SLOW)
            while not said.endswith(b"0\r\n\r\n") and (more := await reader.read(4096)):
                said += more
        except OSError:
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        ends = said.count(b"event: job.succeeded") + said.count(b"event: job.cancelled")
        ends += said.count(b"event: job.failed")
        if ends > 1:
            self.wrong.append(f"{job_id}: its event stream told of {ends} ends: {said[-300:]!r}")
        elif ends:
            self.read_to_the_end += 1
        else:
            self.cut_off += 1  # the API was killed, or had no broker

    async def close(self) -> None:
        """Wait for the readers and cancellations, then end the connections."""
        await asyncio.wait_for(asyncio.gather(*self._tasks), 60)
        await self.store.close()
