"""Processes for the tests of the slab store: they put, read and free until they are told to end.

Every blob is filled with one number, so that a view shows by itself whether it has changed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from omniq.blobs.base import BlobRef
from omniq.blobs.slabs.store import SlabStore
from omniq.errors import BlobNotFound, StoreFull

SHM = Path("/dev/shm")
#: Forks from a server that has imported torch and opened nothing: a start takes milliseconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "omniq.blobs.slabs.store"])


def make_store(
    namespace: str, max_bytes: int = 256 << 20, folder: Path = SHM, idle: float = 30.0
) -> SlabStore:
    return SlabStore(folder, namespace, "host", max_bytes, idle_seconds=idle)


def filled(number: int, nbytes: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((max(1, nbytes // 8),), number, dtype=torch.int64)}


def number_in(tensor: torch.Tensor) -> int:
    """The number that fills the tensor.

    Raises:
        AssertionError: it is not filled with one.
    """
    low, high = torch.aminmax(tensor)
    assert low.item() == high.item(), f"a view holds {low.item()} and {high.item()}"
    return int(low.item())


def start(target: object, *args: object) -> tuple[BaseProcess, Connection]:
    """Run ``target(connection, *args)`` in a new process."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def produce(connection: Connection, namespace: str, job: str, sizes: list[int], keep: int) -> None:
    """Put blobs as fast as can be, send each reference, free all but the newest ``keep``.

    Sends "up" first. Ends when anything arrives; then sends None and leaves what it did not free.
    """
    torch.set_num_threads(1)
    store = make_store(namespace)
    live: list[BlobRef] = []
    number = 0
    connection.send("up")
    while not connection.poll():
        number += 1
        try:
            ref = store.put(f"{job}.{number}", filled(number, random.choice(sizes)))
        except StoreFull:
            if live:
                store.delete(live.pop(0))
            continue
        live.append(ref)
        connection.send(ref.model_dump_json())
        while len(live) > keep:
            store.delete(live.pop(0))
    connection.send(None)


def read(connection: Connection, namespace: str, hold: int, seed: int) -> None:
    """Read each blob whose reference arrives and hold its view for a while, checking it again.

    Sends at the end how many it has read and missed, or the text of what went wrong. One view in
    ten is written to before it is dropped, as a careless engine might.
    """
    torch.set_num_threads(1)
    store = make_store(namespace)
    rng = random.Random(seed)
    views: list[tuple[int, torch.Tensor]] = []
    seen = missed = 0
    try:
        while (message := connection.recv()) is not None:
            ref = BlobRef.model_validate_json(message)
            try:
                tensor = store.get(ref)["x"]
            except BlobNotFound:
                missed += 1
                continue
            assert number_in(tensor) == int(ref.id.split(".")[1]), ref
            views.append((number_in(tensor), tensor))
            del tensor
            seen += 1
            while len(views) > hold:
                number, tensor = views.pop(rng.randrange(len(views)))
                assert number_in(tensor) == number
                if rng.random() < 0.1 and not any(
                    t.data_ptr() == tensor.data_ptr() for _, t in views
                ):
                    tensor.fill_(-1)
                del tensor
    except AssertionError as exc:
        connection.send(str(exc))
    else:
        connection.send((seen, missed))
    views.clear()
    store.close()


def churn(connection: Connection, namespace: str, job: str, seed: int) -> None:
    """Do everything at random, for ever; made to be killed. Says once that it is at it."""
    torch.set_num_threads(1)
    store = make_store(namespace)
    rng = random.Random(seed)
    refs: list[BlobRef] = []
    views: list[torch.Tensor] = []
    connection.send("up")
    number = 0
    while True:
        number += 1
        refs.append(store.put(f"{job}.{number}", filled(number, rng.choice([64, 5000, 300_000]))))
        connection.send(refs[-1].model_dump_json())
        if connection.poll():
            with contextlib.suppress(BlobNotFound):
                views.append(store.get(BlobRef.model_validate_json(connection.recv()))["x"])
        if len(views) > 4:
            views.pop(rng.randrange(len(views)))
        if len(refs) > 8:
            store.delete(refs.pop(rng.randrange(len(refs))))
        if number % 20 == 0:
            store.sweep(lambda blob_id: True)
            time.sleep(0)
