"""The application of ``chain.py``'s stock Celery workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from celery import Celery, chain
from chain_work import COUNT, first, last, middle

URL = f"redis+socket://{os.environ['CHAIN_CELERY_SOCKET']}"
SHM = Path("/dev/shm")

torch.set_num_threads(1)
app = Celery("chain", broker=URL, backend=URL, set_as_current=False)
app.conf.update(
    task_serializer="pickle",
    result_serializer="pickle",
    accept_content=["pickle", "json"],
    broker_connection_retry_on_startup=True,
    result_expires=60,
)


@app.task
def first_tensor(number: int) -> Any:
    return first(number)


@app.task
def middle_tensor(tensor: Any) -> Any:
    return middle(tensor)


@app.task
def last_tensor(tensor: Any) -> int:
    return last(tensor)


@app.task
def first_key(number: int) -> str:
    return _write(first(number), f"chain-{os.getpid()}-{number}")


@app.task
def middle_key(key: str) -> str:
    return _write(middle(_read(key)), f"{key}-2")


@app.task
def last_key(key: str) -> int:
    return last(_read(key))


def in_message(number: int) -> Any:
    """The chain whose messages carry the tensor."""
    return _chain("tensor", number, first_tensor, middle_tensor, last_tensor)


def by_key(number: int) -> Any:
    """The chain whose messages carry a file's name."""
    return _chain("key", number, first_key, middle_key, last_key)


def _chain(kind: str, number: int, one: Any, two: Any, three: Any) -> Any:
    return chain(
        one.s(number).set(queue=f"{kind}1"),
        two.s().set(queue=f"{kind}2"),
        three.s().set(queue=f"{kind}3"),
    )


def _write(tensor: torch.Tensor, key: str) -> str:
    (SHM / key).write_bytes(memoryview(tensor.numpy()).cast("B"))
    return key


def _read(key: str) -> torch.Tensor:
    tensor = torch.from_file(str(SHM / key), shared=False, size=COUNT, dtype=torch.float16)
    (SHM / key).unlink()
    return tensor
