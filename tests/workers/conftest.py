"""Real worker processes for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kombu.pools
import pytest
import redis
from support import wait_until

from omniq.celery import app
from omniq.config import available_pipelines
from omniq.jobs.store import JobStore
from omniq.settings import get_settings

HERE = Path(__file__).parent


class Process:
    """One child process whose output goes to a file."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str]) -> None:
        self.log = log
        with log.open("ab") as out:
            self.popen = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env}
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        def there() -> bool:
            if text in self.output():
                return True
            if self.popen.poll() is not None:
                pytest.fail(f"exited with {self.popen.returncode}:\n{self.output()}")
            return False

        wait_until(there, timeout, f"{text!r} in the log:\n{self.output()[-3000:]}")

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20.0) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(timeout)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts processes and ends what a test leaves."""
    processes: list[Process] = []

    def start(name: str, command: list[str], **env: object) -> Process:
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        process = Process(
            command,
            tmp_path / f"{name}.log",
            {"PYTHONPATH": os.pathsep.join(paths)} | {k: str(v) for k, v in env.items()},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.popen.poll() is None:
            process.kill()


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What tasks noted so far, as texts without time and process."""
    file = tmp_path / "notes"
    monkeypatch.setenv("POOL_NOTES", str(file))

    def read(prefix: str = "") -> list[str]:
        lines = file.read_text().splitlines() if file.exists() else []
        texts = [line.split(" ", 2)[2] for line in lines]
        return [t for t in texts if t.startswith(prefix)]

    return read


@pytest.fixture
def pool_app(broker: object, notes: object) -> Iterator[Any]:
    """The application of ``pool_app.py`` in this process, on the test's broker."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    import pool_app as module

    module.app.follow_settings()
    for name in ("queue", "exchange", "routing_key"):
        module.app.conf[f"task_default_{name}"] = module.QUEUE
    yield module
    kombu.pools.reset()  # a test may have cut this process's connections too


@pytest.fixture
def start_pool(spawn: Callable[..., Process], pool_app: Any) -> Callable[..., Process]:
    """Starts a worker of ``pool_app``."""

    def start(name: str = "w", prefetch: int = 64, **env: object) -> Process:
        process = spawn(
            name,
            [
                sys.executable, "-m", "celery", "-A", "pool_app", "worker", "-Q", pool_app.QUEUE,
                "-n", f"{name}@test", "-l", "INFO", "--prefetch-multiplier", str(prefetch),
            ],
            **env,
        )  # fmt: skip
        process.wait_for(f"{name}@test ready.")
        return process

    return start


@pytest.fixture
def unacked(redis_client: redis.Redis) -> Callable[[], int]:
    """Messages that workers hold."""
    return lambda: int(redis_client.hlen("omniq:unacked"))


@pytest.fixture
def queued(redis_client: redis.Redis) -> Callable[[str], int]:
    """Messages that wait in a queue."""
    from omniq.celery import queue_keys

    return lambda queue: sum(int(redis_client.llen(k)) for k in queue_keys(queue))


@pytest.fixture
def celery_events(pool_app: Any) -> Iterator[list[dict[str, Any]]]:
    """Events as they arrive, from now on."""
    events: list[dict[str, Any]] = []
    with pool_app.app.connection() as connection:
        receiver = pool_app.app.events.Receiver(connection, handlers={"*": events.append})
        stop = threading.Event()

        def listen() -> None:
            for _ in receiver.consume(limit=None, timeout=0.5, wakeup=True):
                if stop.is_set():
                    return

        def loop() -> None:
            while not stop.is_set():
                try:
                    listen()
                except TimeoutError:
                    continue

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()

        def heard() -> bool:
            with pool_app.app.events.default_dispatcher() as dispatcher:
                dispatcher.send("test-hello")
            return bool(events)

        wait_until(heard, 10, "the receiver listens")
        events.clear()
        yield events
        stop.set()
        thread.join(5)


STAGE = (
    '{{stage_id: {name}, engine_type: AR, engine: "stage_engines:Scripted", model: none, '
    "max_in_flight: {window}, engine_args: {args}, retry: {retry}, time_limit: {limit}}}"
)


@dataclass
class Stages:
    """Pipelines of :class:`stage_engines.Scripted` stages, their workers and their jobs."""

    spawn: Callable[..., Process]
    folder: Path
    monkeypatch: pytest.MonkeyPatch
    workers: dict[str, Process] = field(default_factory=dict)

    @property
    def shm(self) -> Path:
        """The folder of the shared-memory blobs."""
        return self.folder / "shm"

    def define(
        self, *edges: str, window: int = 4, limit: str = "null", **args: dict[str, Any]
    ) -> None:
        """The pipeline ``p``, from edges such as ``"a>b"``; ``args`` are engine_args by stage."""
        pairs = [e.split(">") for e in edges]
        names = list(dict.fromkeys(s for p in pairs for s in p))
        retry = json.dumps({"max_retries": 2, "backoff": 0.1, "max_deliveries": 3})
        stages = [
            STAGE.format(
                name=n, window=window, args=json.dumps(args.get(n, {})), retry=retry, limit=limit
            )
            for n in names
        ]
        fed = {p[-1] for p in pairs if len(p) > 1}
        lines = [f"  - {{from: {a}.text, to: {b}.{a}}}" for a, *rest in pairs for b in rest]
        lines += [f"  - {{from: input.prompt, to: {n}.prompt}}" for n in names if n not in fed]
        text = "\n".join(
            ["name: p", "inputs: {prompt: {type: text}}", "stages:"]
            + [f"  - {s}" for s in stages]
            + ["edges:", *lines]
            + [f"outputs: {{text: {{from: {names[-1]}.text, type: text}}}}"]
        )
        (self.folder / "p.yaml").write_text(text)
        self.monkeypatch.setenv("OMNIQ_PIPELINES", json.dumps([str(self.folder / "p.yaml")]))
        self.monkeypatch.setenv("OMNIQ_HEARTBEAT", "0.3")
        self.shm.mkdir(exist_ok=True)
        self.monkeypatch.setenv("OMNIQ_SHM_DIR", str(self.shm))
        self.monkeypatch.setenv("OMNIQ_VISIBILITY_TIMEOUT", "3")
        for cached in (get_settings, available_pipelines):
            cached.cache_clear()
        app.follow_settings()

    def start(self, *stages: str, ready: bool = True, **env: object) -> None:
        """Workers of these stages."""
        for stage in stages:
            command = [sys.executable, str(HERE / "run_stage.py"), stage]
            self.workers[stage] = self.spawn(stage, command, **env)
        for stage in stages if ready else ():
            self.workers[stage].wait_for("stage_ready")


@pytest.fixture
def stages(
    spawn: Callable[..., Process], tmp_path: Path, broker: object, notes: object,
    monkeypatch: pytest.MonkeyPatch,
) -> Stages:  # fmt: skip
    return Stages(spawn, tmp_path, monkeypatch)


@pytest.fixture
async def store(broker: object) -> AsyncIterator[JobStore]:
    store = JobStore.from_settings()
    yield store
    await store.close()


@pytest.fixture
def own_broker_stages(
    spawn: Callable[..., Process], tmp_path: Path, own_valkey: object, notes: object,
    monkeypatch: pytest.MonkeyPatch,
) -> Stages:  # fmt: skip
    """Like ``stages``, on a broker of the test's own."""
    return Stages(spawn, tmp_path, monkeypatch)
