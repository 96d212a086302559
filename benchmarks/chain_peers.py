"""The systems that ``chain.py`` compares omniq with; none of them keeps a record of a request.

Each stage is a process of its own and does what :mod:`chain_work` says.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import torch
from chain_driver import drive_window
from chain_work import COUNT, first, last, middle

FOLDER = Path(__file__).parent
CONTEXT = multiprocessing.get_context("spawn")
#: Slots of a slab: more than requests are in flight.
SLOTS = 64


class Slab:
    """Slots of one shared-memory segment, mapped once and reused; request i has slot i % SLOTS."""

    def __init__(self, name: str, *, create: bool) -> None:
        size = SLOTS * COUNT * 2
        self.segment = shared_memory.SharedMemory(name, create=create, size=size if create else 0)
        if not create:
            resource_tracker.unregister(f"/{name}", "shared_memory")

    def slot(self, number: int) -> torch.Tensor:
        return torch.frombuffer(
            self.segment.buf, dtype=torch.float16, count=COUNT, offset=number % SLOTS * COUNT * 2
        )


class Processes:
    """Base: three spawned stage processes and a blocking client."""

    name: str

    def start(self, target: Callable[..., None], *args: Any) -> None:
        up = CONTEXT.SimpleQueue()
        self.stages = [
            CONTEXT.Process(target=target, args=(stage, up, *args), daemon=True)
            for stage in (1, 2, 3)
        ]
        for process in self.stages:  # one after the other: a stage maps its predecessor's slab
            process.start()
            up.get()

    @property
    def processes(self) -> list[int]:
        return [p.pid for p in self.stages if p.pid is not None]

    def submit(self, number: int) -> Any:
        raise NotImplementedError

    def wait(self, handle: Any) -> int:
        raise NotImplementedError

    def drive(self, numbers: range, in_flight: int) -> list[float]:
        return drive_window(numbers, in_flight, self.submit, self.wait)

    def close(self) -> None:
        for process in self.stages:
            process.terminate()
        for process in self.stages:
            process.join(10)


# -- the bound -------------------------------------------------------------------------------------


def _listen_on_lists(stage: int, up: Any, socket: str, run: str) -> None:
    import redis

    torch.set_num_threads(1)
    client = redis.Redis(unix_socket_path=socket, socket_timeout=None)
    before = Slab(f"{run}-{stage - 1}", create=False) if stage > 1 else None
    behind = Slab(f"{run}-{stage}", create=True) if stage < 3 else None
    up.put(stage)
    while True:
        popped: Any = client.blpop([f"stage{stage}"])
        number = json.loads(popped[1])["number"]
        tensor = first(number) if before is None else middle(before.slot(number))
        if behind is None:
            client.rpush("done", json.dumps({"number": last(tensor)}))
            continue
        behind.slot(number).copy_(tensor)
        message = {"number": number, "key": f"{stage}/{number % SLOTS}", "shape": [COUNT]}
        client.rpush(f"stage{stage + 1}", json.dumps(message))


class RedisLists(Processes):
    """What Python can do at most over Redis: one list a stage, a warm slab, nothing else."""

    name = "Redis lists + warm slab (bound)"

    def __init__(self, socket: str) -> None:
        import redis

        self.client = redis.Redis(unix_socket_path=socket, socket_timeout=None)
        self.run = f"chain{os.getpid()}"
        self.start(_listen_on_lists, socket, self.run)

    def submit(self, number: int) -> int:
        self.client.rpush("stage1", json.dumps({"number": number}))
        return number

    def wait(self, handle: Any) -> int:
        popped: Any = self.client.blpop(["done"])
        number: int = json.loads(popped[1])["number"]
        return number

    def close(self) -> None:
        super().close()
        for stage in (1, 2):  # their processes were terminated
            segment = shared_memory.SharedMemory(f"{self.run}-{stage}")
            segment.close()
            segment.unlink()


# -- multiprocessing -------------------------------------------------------------------------------


def _listen_on_queue(stage: int, up: Any, queues: list[Any]) -> None:
    torch.set_num_threads(1)
    up.put(stage)
    while True:
        number, array = queues[stage - 1].get()
        if stage == 1:
            answer: Any = first(number).numpy()
        elif stage == 2:
            answer = middle(torch.from_numpy(array)).numpy()
        else:
            answer = last(torch.from_numpy(array))
        queues[stage].put((number, answer))


class PickleQueues(Processes):
    """``multiprocessing.Queue`` between the stages, arrays pickled."""

    name = "multiprocessing queues, pickles"

    def __init__(self) -> None:
        self.queues = [CONTEXT.Queue() for _ in range(4)]
        self.start(_listen_on_queue, self.queues)

    def submit(self, number: int) -> int:
        self.queues[0].put((number, None))
        return number

    def wait(self, handle: Any) -> int:
        answer: int = self.queues[3].get()[1]
        return answer


def _listen_to_hub(stage: int, up: Any, own: Any, hub: Any, folder: str) -> None:
    from vllm_omni_connector import load_connector

    torch.set_num_threads(1)
    connector: Any = load_connector(Path(folder))({"stage_id": stage})
    up.put(stage)
    while True:
        number, metadata = own[stage - 1].get()
        if stage == 1:
            tensor = first(number)
        else:
            key = f"r{number}_{stage - 1}"
            value, _ = connector.get(str(stage - 1), str(stage), key, metadata)
            tensor = middle(value["t"])
        if stage == 3:
            hub.put((stage, number, last(tensor)))
            continue
        key = f"r{number}_{stage}"
        _, _, metadata = connector.put(str(stage), str(stage + 1), key, {"t": tensor})
        hub.put((stage, number, metadata))


class VllmOmniHub(Processes):
    """An orchestrator with one queue to each stage, tensors by vllm-omni's own connector."""

    name = "hub + vllm-omni connector"

    def __init__(self, folder: str) -> None:
        self.own, self.hub = [CONTEXT.Queue() for _ in range(3)], CONTEXT.Queue()
        self.done: dict[int, int] = {}
        self.start(_listen_to_hub, self.own, self.hub, folder)

    def submit(self, number: int) -> int:
        self.own[0].put((number, None))
        return number

    def wait(self, handle: Any) -> int:
        while handle not in self.done:
            stage, number, answer = self.hub.get()
            if stage == 3:
                self.done[number] = answer
            else:
                self.own[stage].put((number, answer))
        return self.done.pop(handle)


# -- Celery ----------------------------------------------------------------------------------------


class StockCelery:
    """A chain of three tasks on stock Celery workers, one process each; Redis is all they share.

    Args:
        by_key: the tensor lies in a file in /dev/shm and the message carries its name; otherwise it
            is in the message, pickled.
    """

    def __init__(self, socket: str, logs: Path, *, by_key: bool) -> None:
        self.name = f"stock Celery chain, {'key' if by_key else 'tensor'} in the message"
        # Celery refuses pickles to root otherwise.
        os.environ.update(CHAIN_CELERY_SOCKET=socket, C_FORCE_ROOT="1")
        import chain_celery

        self.signature = chain_celery.by_key if by_key else chain_celery.in_message
        kind = "key" if by_key else "tensor"
        self.workers = []
        for stage in (1, 2, 3):
            log = logs / f"celery-{kind}-{stage}.log"
            command = [sys.executable, "-m", "celery", "-A", "chain_celery", "worker",
                       "-P", "solo", "-l", "INFO",
                       "-Q", f"{kind}{stage}", "-n", f"{kind}{stage}@chain"]  # fmt: skip
            with log.open("wb") as out:
                self.workers.append(subprocess.Popen(command, stdout=out, stderr=out, cwd=FOLDER))
            _until_in(log, "ready.")

    @property
    def processes(self) -> list[int]:
        return [w.pid for w in self.workers]

    def drive(self, numbers: range, in_flight: int) -> list[float]:
        return drive_window(
            numbers,
            in_flight,
            lambda n: self.signature(n).apply_async(),
            lambda handle: int(handle.get(timeout=60)),
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.wait(30)


# -- Ray -------------------------------------------------------------------------------------------


class RayActors:
    """One actor a stage, arrays by Ray's object store; in a Python of its own."""

    name = "Ray actors"

    def __init__(self, python: str) -> None:
        self.process = subprocess.Popen(
            [python, str(FOLDER / "chain_ray.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "up\n":
            raise RuntimeError(f"Ray did not start with {python}")

    @property
    def processes(self) -> list[int]:
        return [self.process.pid]

    def drive(self, numbers: range, in_flight: int) -> list[float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{numbers.start} {numbers.stop} {in_flight}\n")
        self.process.stdin.flush()
        seconds: list[float] = json.loads(self.process.stdout.readline())
        return seconds

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def _until_in(log: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in log.read_text():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {log.name}: {text!r}\n{log.read_text()}")
        time.sleep(0.05)
