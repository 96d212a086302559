"""Served: clients through omniq's API and Celery against native `vllm serve`.

    python benchmarks/llm_serve.py --model build/smollm2-135m-instruct [--rounds 5] [--json FILE]

Both servers are up at the same time and take turns; the same asyncio client streams
``/v1/completions`` from either, with token ids as prompts. First one request at a time, alternating
request by request: time to the first token, and time a token after it. Then ``--requests`` clients
at once, alternating round by round: tokens a second. Same weights, same engine arguments, greedy,
no end token. ``--device cuda`` does the same on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
from common import load, machine, now, percentile, table, write_json
from llm_common import arguments, engine_args, prompts, set_environment

NATIVE, OMNIQ = "vllm serve", "omniq serve"
#: vLLM for CPU is a distribution of another name, which vLLM's own command line does not know.
VLLM = """
import importlib.metadata as metadata
known = metadata.version
def version(name):
    try:
        return known(name)
    except metadata.PackageNotFoundError:
        return known(f"{name}-cpu") + "+cpu"
metadata.version = version
from vllm.entrypoints.cli.main import main
main()
"""


@dataclass(slots=True)
class Answer:
    """One streamed answer: seconds since the request was sent, and what it said."""

    first: float
    last: float
    tokens: int
    text: str

    @property
    def per_token(self) -> float:
        """Seconds a token after the first one."""
        return (self.last - self.first) / (self.tokens - 1)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """One of the two."""

    def __init__(self, name: str, given: argparse.Namespace, folder: Path) -> None:
        self.name, self.port = name, free_port()
        command = {
            NATIVE: [sys.executable, "-c", VLLM, "serve"],
            OMNIQ: [sys.executable, "-m", "omniq", "serve"],
        }[name]
        flags = ["--port", str(self.port), "--served-model-name", "bench"]
        if name == NATIVE:
            flags += ["--disable-uvicorn-access-log", "--host", "127.0.0.1"]
        for arg, value in engine_args(given).items():
            flag = arg.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{'' if value else 'no-'}{flag}")
            elif isinstance(value, dict):
                flags += [f"--{flag}", orjson.dumps(value).decode()]
            else:
                flags += [f"--{flag}", str(value)]
        env = {
            **os.environ,
            "OMNIQ_DATA_DIR": str(folder),
            "OMNIQ_NAMESPACE": f"bench{self.port}",
            "OMNIQ_BROKER_PORT": str(free_port()),
            "OMNIQ_READY_TIMEOUT": "900",
            "OMNIQ_LOG_LEVEL": "WARNING",
        }
        self.log = folder / f"{name.partition(' ')[0]}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, str(given.model.resolve()), *flags],
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=600,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def wait_up(self) -> None:
        deadline = time.monotonic() + 900
        path = "/ready" if self.name == OMNIQ else "/health"
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} has not come up:\n{self.log.read_text()[-4000:]}")
            try:
                if (await self.http.get(path)).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.5)

    async def ask(self, ids: list[int], tokens: int) -> Answer:
        body = {
            "model": "bench",
            "prompt": ids,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = now()
        first = last = 0.0
        made, text = 0, []
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{self.name}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                at = now() - started
                chunk = orjson.loads(line[6:])
                if chunk.get("error"):
                    raise RuntimeError(f"{self.name}: {chunk}")
                if chunk["choices"]:
                    first, last = first or at, at
                    text.append(chunk["choices"][0]["text"])
                if chunk.get("usage"):
                    made = chunk["usage"]["completion_tokens"]
        return Answer(first, last, made, "".join(text))

    async def close(self) -> None:
        await self.http.aclose()
        self.process.send_signal(signal.SIGINT)
        try:
            await asyncio.to_thread(self.process.wait, 30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


async def measure(given: argparse.Namespace, servers: list[Server]) -> dict[str, Any]:
    alone: dict[str, list[Answer]] = {s.name: [] for s in servers}
    rounds: dict[str, list[float]] = {s.name: [] for s in servers}
    firsts: dict[str, list[float]] = {s.name: [] for s in servers}
    equal = 0
    singles = prompts(argparse.Namespace(**{**vars(given), "requests": given.singles}), 1000)
    for number, ids in enumerate([singles[0], *singles]):  # the first one warms up
        order = servers if number % 2 else servers[::-1]
        for server in order:
            await asyncio.sleep(given.pause)
            answer = await server.ask(ids, given.output_tokens)
            if number:
                alone[server.name].append(answer)
    print(f"one at a time is done: load {load():.1f}", flush=True)
    for number in range(-1, given.rounds):  # round -1 warms up
        said = {}
        for server in servers if number % 2 else servers[::-1]:
            await asyncio.sleep(given.pause)
            started = now()
            answers = await asyncio.gather(
                *[server.ask(ids, given.output_tokens) for ids in prompts(given, number)]
            )
            took = now() - started
            said[server.name] = [a.text for a in answers]
            assert all(a.tokens == given.output_tokens for a in answers), "some tokens are missing"
            if number >= 0:
                rounds[server.name].append(took)
                firsts[server.name] += [a.first for a in answers]
        if number >= 0:
            equal += sum(map(str.__eq__, said[NATIVE], said[OMNIQ]))
        print(f"round {number}: load {load():.1f}", flush=True)
    return {"alone": alone, "rounds": rounds, "firsts": firsts, "equal": equal}


def report(given: argparse.Namespace, found: dict[str, Any]) -> None:
    tokens = given.requests * given.output_tokens
    native, ours = found["alone"][NATIVE], found["alone"][OMNIQ]
    rows = []
    for name in (NATIVE, OMNIQ):
        alone = found["alone"][name]
        ratios = [
            a / b for a, b in zip(found["rounds"][NATIVE], found["rounds"][name], strict=True)
        ]
        rows.append(
            [
                name,
                f"{statistics.median(a.first for a in alone) * 1e3:.1f}",
                f"{percentile([a.first for a in alone], 0.9) * 1e3:.1f}",
                f"{statistics.median(a.per_token for a in alone) * 1e3:.2f}",
                f"{tokens / statistics.median(found['rounds'][name]):,.0f}",
                f"{statistics.median(ratios):.3f}",
                f"{min(ratios):.3f}-{max(ratios):.3f}",
                f"{statistics.median(found['firsts'][name]) * 1e3:.0f}",
            ]
        )
    header = ["", "TTFT ms p50", "p90", "ITL ms", f"tokens/s at {given.requests}", "ratio",
              "of the rounds", f"TTFT ms p50 at {given.requests}"]  # fmt: skip
    print(table(header, rows))
    added = statistics.median(o.first - n.first for n, o in zip(native, ours, strict=True))
    itl = statistics.median(o.per_token / n.per_token for n, o in zip(native, ours, strict=True))
    mean = statistics.mean(a.per_token for a in ours) / statistics.mean(a.per_token for a in native)
    print(
        f"TTFT added, median of pairs: {added * 1e3:.2f} ms; "
        f"ITL: p50 of pairs {itl:.3f}, mean {mean:.3f} x native"
    )
    print(f"texts equal: {found['equal']}/{given.requests * given.rounds}")
    if given.json:
        samples = {
            name: [[a.first, a.last, a.tokens] for a in answers]
            for name, answers in found["alone"].items()
        }
        settings = {k: str(v) for k, v in vars(given).items()}
        write_json(
            given.json,
            {"machine": machine(), "settings": settings, **found, "alone": samples},
        )


async def run(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as folder:
        servers = [Server(name, given, Path(folder)) for name in (NATIVE, OMNIQ)]
        try:
            await asyncio.gather(*[s.wait_up() for s in servers])
            found = await measure(given, servers)
        finally:
            await asyncio.gather(*[s.close() for s in servers])
    report(given, found)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--singles", type=int, default=30, help="Requests one at a time.")
    given = parser.parse_args()
    set_environment(given)
    asyncio.run(run(given))


if __name__ == "__main__":
    main()
