"""Feeding bad inputs and watching: what is accepted, how long it takes, what goes wrong."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
from bad_inputs import request
from fuzz_system import KEY
from targets import LOCAL

#: Seconds after which one input counts as a hang.
HANG = 20.0


@dataclass
class Report:
    """What a target did."""

    target: str
    inputs: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    answers: Counter[int] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Take in what another report counts."""
        self.inputs += other.inputs
        self.accepted += other.accepted
        self.seconds += other.seconds
        self.slowest = max(self.slowest, other.slowest)
        self.answers += other.answers
        self.findings += other.findings

    def line(self) -> str:
        """One row of the table."""
        rate = self.inputs / self.seconds if self.seconds else 0.0
        codes = " ".join(f"{code}:{n}" for code, n in sorted(self.answers.items()))
        return (
            f"{self.target:12} {self.inputs:8} {self.accepted:8} {rate:8.0f}/s "
            f"{self.slowest * 1000:8.0f} ms {len(self.findings):4}  {codes}"
        )


HEADER = f"{'target':12} {'inputs':>8} {'accepted':>8} {'rate':>10} {'slowest':>11} {'bad':>4}"


@contextlib.contextmanager
def no_hang(seconds: float = HANG) -> Iterator[None]:
    """Raises ``TimeoutError`` in the main thread after so long."""

    def over(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def feed(name: str, count: int, seed: int, until: float = float("inf")) -> Report:
    """``count`` inputs to a local target; input *i* depends on the seed and *i* only."""
    report = Report(name)
    begun = time.monotonic()
    for i in range(count):
        if time.monotonic() > until:
            break
        started = time.monotonic()
        try:
            with no_hang():
                report.accepted += LOCAL[name](random.Random(f"{name}-{seed}-{i}"))
        except Exception:  # whatever it is, it is a finding
            report.findings.append(f"{name} seed {seed} input {i}:\n{traceback.format_exc()}")
        report.inputs += 1
        report.slowest = max(report.slowest, time.monotonic() - started)
    report.seconds = time.monotonic() - begun
    return report


def feed_api(
    url: str,
    count: int,
    seed: int,
    until: float = float("inf"),
    *,
    clients: int = 1,
    first: int = 0,
) -> Report:
    """``count`` requests from number ``first`` on to a running API, by several clients at once."""
    report = Report("api")
    begun = time.monotonic()
    numbers = iter(range(first, first + count))
    lock = threading.Lock()

    def ask() -> None:
        with httpx.Client(base_url=url, headers=KEY, timeout=HANG) as client:
            while time.monotonic() < until:
                with lock:
                    i = next(numbers, None)
                if i is None:
                    return
                part = Report("api", inputs=1)
                asked = request(random.Random(f"api-{seed}-{i}"))
                started = time.monotonic()
                fault = _ask(client, asked, part)
                part.slowest = time.monotonic() - started
                if fault:
                    shown = {**asked, "content": asked["content"][:600]}
                    part.findings.append(f"api seed {seed} request {i}: {fault}\n{shown}")
                with lock:
                    report.add(part)

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(ask) for _ in range(clients)]:
            done.result()
    report.seconds = time.monotonic() - begun
    return report


def _ask(client: httpx.Client, asked: dict[str, Any], report: Report) -> str | None:
    """What is wrong with the answer, if anything is."""
    try:
        response = client.send(client.build_request(**asked))
    except httpx.TimeoutException:
        return "no answer"
    except (httpx.InvalidURL, httpx.LocalProtocolError):
        return None  # no client can send it
    except httpx.TransportError as exc:
        return repr(exc)
    report.answers[response.status_code] += 1
    report.accepted += response.status_code < 400
    status, shown = response.status_code, response.text[:300]
    if status >= 500:
        return f"status {status}: {shown}"
    if status >= 400 and not _is_error(response):
        return f"status {status} without an error document: {shown}"
    return "a traceback in the answer" if "Traceback (most" in response.text else None


def _is_error(response: httpx.Response) -> bool:
    try:
        body = json.loads(response.content)
    except ValueError:
        return response.request.method == "HEAD" or not response.content
    return isinstance(body, dict) and bool({"code", "error"} & body.keys())
