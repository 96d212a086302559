"""The ways of moving one tensor from one process to another that ``hop.py`` compares.

Each is made once in the producer and once in the consumer. ``put`` returns the small message that
the producer sends through a pipe, the same for all; ``get`` returns a tensor the consumer can read.
What has to be freed is freed after the time was taken, by ``done`` in the consumer and ``free`` in
the producer.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import torch

from omniq.blobs.base import BlobRef, BlobStore

SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Config:
    """What both sides need: a name of this run, Valkey's socket, the folder of vllm-omni."""

    run: str
    socket: str
    vllm_omni: str | None


class Transport:
    """Base: a transport that need not free anything."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def put(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def get(self, message: Any) -> torch.Tensor:
        raise NotImplementedError

    def done(self, message: Any) -> None:
        """In the consumer, when it has read."""

    def free(self, message: Any) -> None:
        """In the producer, when the consumer is done."""

    def close(self) -> None:
        """At the end, on both sides."""


class WarmSlab(Transport):
    """The bound: two segments per size, mapped on both sides from the start, copied into in turn.

    No header, no lifetime, no check: what is left is the copy.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.segments: dict[str, shared_memory.SharedMemory] = {}
        self.made: list[str] = []
        self.turn = 0

    def put(self, tensor: torch.Tensor) -> Any:
        self.turn ^= 1
        name = f"{self.config.run}-{tensor.nbytes}-{self.turn}"
        if name not in self.segments:
            self.segments[name] = shared_memory.SharedMemory(name, create=True, size=tensor.nbytes)
            self.made.append(name)
        self._tensor(name, tuple(tensor.shape)).copy_(tensor)
        return name, tuple(tensor.shape)

    def get(self, message: Any) -> torch.Tensor:
        name, shape = message
        if name not in self.segments:
            self.segments[name] = shared_memory.SharedMemory(name)
        return self._tensor(name, shape)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        count = shape[0] * shape[1]
        flat = torch.frombuffer(self.segments[name].buf, dtype=torch.float16, count=count)
        return flat.view(shape)

    def close(self) -> None:
        for name in self.made:
            self.segments[name].unlink()


class Stored(Transport):
    """One of omniq's blob stores; the message is the JSON of a BlobRef, as in a task."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.store = self.make_store()
        self.prefix = f"{config.run}.stage.1"
        self.number = 0

    def make_store(self) -> BlobStore:
        raise NotImplementedError

    def put(self, tensor: torch.Tensor) -> Any:
        self.number += 1
        ref = self.store.put(f"{self.prefix}.{self.number}", {"hidden_states": tensor})
        return ref.to_json()

    def get(self, message: Any) -> torch.Tensor:
        return self.store.get(BlobRef.from_json(message))["hidden_states"]

    def free(self, message: Any) -> None:
        assert self.store.delete(BlobRef.from_json(message))

    def close(self) -> None:
        self.store.close()


class OmniqSlabs(Stored):
    """omniq's shared-memory store."""

    def make_store(self) -> BlobStore:
        from omniq.blobs.slabs import SlabStore

        return SlabStore(SHM, self.config.run, "host", 8 << 30)


class OmniqRedis(Stored):
    """omniq's Redis store, over a Unix socket."""

    def make_store(self) -> BlobStore:
        import redis

        from omniq.blobs.redis import RedisStore

        client = redis.Redis(unix_socket_path=self.config.socket)
        return RedisStore(client, ttl=600.0, max_bytes=1 << 30)


class SafetensorsFile(Transport):
    """``save_file`` into /dev/shm, ``safe_open`` on the other side."""

    number = 0

    def put(self, tensor: torch.Tensor) -> Any:
        from safetensors.torch import save_file

        self.number += 1
        path = f"{SHM}/{self.config.run}-{self.number}.safetensors"
        save_file({"t": tensor}, path)
        return path

    def get(self, message: Any) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(message, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor("t")
        return tensor

    def done(self, message: Any) -> None:
        Path(message).unlink()


class FreshSegment(Transport):
    """``multiprocessing.shared_memory``, one segment per tensor."""

    number = 0

    def put(self, tensor: torch.Tensor) -> Any:
        self.number += 1
        name = f"{self.config.run}-{self.number}"
        segment = shared_memory.SharedMemory(name, create=True, size=tensor.nbytes)
        count = tensor.numel()
        torch.frombuffer(segment.buf, dtype=torch.float16, count=count).copy_(tensor.view(-1))
        segment.close()
        resource_tracker.unregister(f"/{name}", "shared_memory")
        return name, tuple(tensor.shape)

    def get(self, message: Any) -> torch.Tensor:
        name, shape = message
        self.segment = shared_memory.SharedMemory(name)
        count = shape[0] * shape[1]
        return torch.frombuffer(self.segment.buf, dtype=torch.float16, count=count).view(shape)

    def done(self, message: Any) -> None:
        self.segment.unlink()
        self.segment.close()


class VllmOmni(Transport):
    """vllm-omni's SharedMemoryConnector, with the metadata its ``put`` returns."""

    number = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        from vllm_omni_connector import load_connector

        assert config.vllm_omni is not None
        self.connector: Any = load_connector(Path(config.vllm_omni))({"stage_id": 0})

    def put(self, tensor: torch.Tensor) -> Any:
        self.number += 1
        key = f"{self.config.run}-{self.number}"
        ok, _, metadata = self.connector.put("0", "1", key, {"t": tensor})
        assert ok
        return key, metadata

    def get(self, message: Any) -> torch.Tensor:
        key, metadata = message
        value, _ = self.connector.get("0", "1", key, metadata)
        tensor: torch.Tensor = value["t"]
        return tensor


#: By the name in the table.
TRANSPORTS: dict[str, type[Transport]] = {
    "warm slab (bound)": WarmSlab,
    "omniq slabs": OmniqSlabs,
    "omniq redis": OmniqRedis,
    "safetensors file": SafetensorsFile,
    "fresh segment": FreshSegment,
    "vllm-omni connector": VllmOmni,
}


def new_run() -> str:
    """A name for one run, valid in all the places that use it."""
    return f"bench{os.getpid()}x{secrets.token_hex(3)}"
