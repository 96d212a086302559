"""What the processes of one stage tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from omniq.errors import ConfigError, EngineDead, EngineError, EngineOutOfMemory

#: Tensors begin at multiples of so many bytes in a message's buffer: what kernels like.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in a message's buffer."""

    start: int
    shape: torch.Size
    dtype: torch.dtype

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor in it."""
        size = self.shape.numel() * self.dtype.itemsize
        return buffer[self.start : self.start + size].view(self.dtype).view(self.shape)


@dataclass(slots=True)
class Message:
    """A value whose tensors are taken out: ``plain`` has a place for each.

    The buffer is ``size`` bytes long; 0: there are no tensors.
    """

    plain: Any
    size: int = 0
    _parts: list[tuple[_Place, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, value: Any) -> Message:
        """From a value of mappings, lists and tuples."""
        made = cls(None)
        made.plain = made._without(value)
        return made

    def buffer(self, device: str) -> torch.Tensor:
        """The tensors' bytes, uint8 [size] on ``device``."""
        whole = torch.empty(self.size, dtype=torch.uint8, device=device)
        for place, part in self._parts:
            place.view(whole).copy_(part)
        return whole

    @staticmethod
    def value(plain: Any, buffer: torch.Tensor | None) -> Any:
        """The value again; its tensors are views of ``buffer``."""
        if isinstance(plain, _Place):
            assert buffer is not None, "a message with tensors has a buffer"
            return plain.view(buffer)
        if isinstance(plain, dict):
            return {n: Message.value(v, buffer) for n, v in plain.items()}
        if isinstance(plain, list | tuple):
            return type(plain)(Message.value(v, buffer) for v in plain)
        return plain

    def _without(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            place = _Place(self.size, value.shape, value.dtype)
            self._parts.append((place, value))
            self.size = _aligned(self.size + value.nbytes)
            return place
        if isinstance(value, dict):
            return {n: self._without(v) for n, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._without(v) for v in value)
        return value


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def receive(plain: Any, size: int, source: int, device: str) -> Any:
    """The value of a message that rank ``source`` sends; blocks."""
    if not size:
        return Message.value(plain, None)
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    dist.recv(buffer, source)
    return Message.value(plain, buffer)


@dataclass(frozen=True, slots=True)
class Done:
    """A follower has done its work; what it computed follows as a message of ``size`` bytes."""

    plain: Any = None
    size: int = 0
    hit: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """A follower could not do its work; ``kind`` is the name of the error."""

    kind: str
    message: str

    @classmethod
    def of(cls, exc: Exception) -> Fault:
        """From what was raised."""
        if isinstance(exc, EngineError | ConfigError):
            return cls(type(exc).__name__, exc.message)
        return cls(EngineError.__name__, f"{type(exc).__name__}: {exc}")

    def error(self, rank: int) -> EngineError | ConfigError:
        """To raise where the request is known."""
        cls = _KINDS.get(self.kind, EngineError)
        return cls(f"rank {rank}: {self.message}")


Answer = Done | Fault
_KINDS: dict[str, type[EngineError] | type[ConfigError]] = {
    cls.__name__: cls for cls in (EngineDead, EngineOutOfMemory, ConfigError)
}
