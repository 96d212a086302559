"""What several tests of blobs need."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omniq.blobs import BlobRef
from omniq.settings import get_settings

Tensors = dict[str, torch.Tensor]


def make(nbytes: int = 1024, seed: int = 0) -> Tensors:
    """One uint8 tensor of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)}


def blob_keys(client: Any) -> list[bytes]:
    """Keys that hold blobs, whole or half written; not the hash that notes them."""
    found = (f"{get_settings().namespace}:{kind}:*" for kind in ("blob", "part"))
    return [key for pattern in found for key in client.scan_iter(pattern)]


def bits(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order: equality that NaNs do not spoil."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same(got: Tensors, expected: Tensors) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(got[name]) == bits(tensor), name


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from blob_tools import make
from omniq.blobs import SlabStore, host_identity
folder = Path(sys.argv[1])
store = SlabStore(folder, sys.argv[2], host_identity(folder), 1 << 30)
for seed, blob_id in enumerate(sys.argv[3].split(",")):
    print(store.put(blob_id, make(seed=seed)).model_dump_json(), flush=True)
"""
WAIT = "sys.stdin.read()"


class Writer:
    """Another process that writes blobs ``make(seed=0, 1, ...)`` and then does ``then``."""

    def __init__(self, namespace: str, *blob_ids: str, then: str = WAIT) -> None:
        here = str(Path(__file__).parent)
        argv = [sys.executable, "-c", WRITER + then, "/dev/shm", namespace, ",".join(blob_ids)]
        self.process = subprocess.Popen(
            [*argv, here], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.refs = [BlobRef.model_validate_json(self.line()) for _ in blob_ids]

    def line(self) -> str:
        """What it prints next."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def small_tmpfs(folder: Path, size: str = "8M") -> Iterator[Path]:
    """A tmpfs of its own; skips the test where it may not be mounted."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
