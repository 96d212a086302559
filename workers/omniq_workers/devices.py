"""Pinning a worker to its devices, before anything that looks at them is imported.

CUDA reads ``CUDA_VISIBLE_DEVICES`` once, when it is initialised; a worker that sets it later sees
every GPU of the machine.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from omniq.errors import ConfigError

CPU = "cpu"
VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICE_FOLDER = Path("/dev")
_UUID = re.compile(r"^(GPU|MIG)-[0-9A-Za-z/-]+$")


def check_devices(names: Iterable[str]) -> list[str]:
    """GPU numbers, GPU UUIDs, or ``cpu`` alone; ``cuda:0`` is the same as ``0``.

    Raises:
        ConfigError: it is none of these.
    """
    devices = [name.strip().removeprefix("cuda:") for name in names]
    text = ",".join(devices)
    for device in devices:
        if not (device == CPU or device.isdecimal() or _UUID.match(device)):
            raise ConfigError(
                f"device {device!r} is unknown",
                hint="--devices takes GPU numbers (0 or 0,1), GPU UUIDs, or cpu",
            )
    if len(set(devices)) != len(devices):
        raise ConfigError(f"devices {text!r} name one device twice")
    if CPU in devices and len(devices) > 1:
        raise ConfigError(f"devices {text!r} mix cpu and GPUs")
    return devices


def count_gpus(folder: Path = DEVICE_FOLDER) -> int:
    """NVIDIA GPUs this process can open; asks the device files, so that no CUDA is started."""
    return sum(1 for p in folder.glob("nvidia*") if p.name.removeprefix("nvidia").isdecimal())


def visible_gpus() -> int:
    """How many GPUs this process and those it starts can use."""
    return len(_visible(os.environ, count_gpus()))


def pin(
    devices: list[str],
    *,
    environ: MutableMapping[str, str] = os.environ,
    gpus: int | None = None,
) -> tuple[list[str], str]:
    """Restrict this process to ``devices``; empty: one GPU if there is one, else the CPU.

    Numbers count the GPUs that are visible now, so they go through a ``CUDA_VISIBLE_DEVICES`` that
    a scheduler has set.

    Returns:
        What was pinned (``["cpu"]``, or physical numbers and UUIDs), and the torch device of the
        first (``cpu`` or ``cuda:0``).

    Raises:
        ConfigError: torch has already looked at the GPUs, or there is no such GPU.
    """
    visible = _visible(environ, count_gpus() if gpus is None else gpus)
    if not devices:
        devices = ["0"] if visible else [CPU]
    if devices == [CPU]:
        environ[VARIABLE] = ""
        return [CPU], CPU
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ConfigError("the GPUs are in use by this process already; pin devices first")
    pinned = [_physical(d, visible) for d in devices]
    # Without it CUDA counts the fastest GPU first, and numbers differ from nvidia-smi's.
    environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    environ[VARIABLE] = ",".join(pinned)
    return pinned, "cuda:0"


def _visible(environ: Mapping[str, str], gpus: int) -> list[str]:
    named = environ.get(VARIABLE)
    if named is None:
        return [str(i) for i in range(gpus)]
    if not gpus:
        return []
    return [part.strip() for part in named.split(",") if part.strip() not in {"", "-1"}]


def _physical(device: str, visible: list[str]) -> str:
    if not device.isdecimal():
        return device
    if int(device) < len(visible):
        return visible[int(device)]
    if not visible:
        raise ConfigError(
            f"there is no GPU {device}: this machine has none, or none is visible",
            hint="use --devices cpu, or check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    raise ConfigError(
        f"there is no GPU {device}; visible: 0 to {len(visible) - 1}",
        hint="numbers count the GPUs in CUDA_VISIBLE_DEVICES, or all",
    )
