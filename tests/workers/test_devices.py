"""Which devices a worker is pinned to."""

from __future__ import annotations

from pathlib import Path

import pytest
from omniq_workers.devices import check_devices, count_gpus, pin

from omniq.errors import ConfigError


@pytest.mark.parametrize(
    ("devices", "gpus", "before", "pinned", "device", "after"),
    [
        ([], 0, None, ["cpu"], "cpu", ""),
        ([], 2, None, ["0"], "cuda:0", "0"),
        (["cpu"], 2, None, ["cpu"], "cpu", ""),
        (["1"], 2, None, ["1"], "cuda:0", "1"),
        (["0", "1"], 2, None, ["0", "1"], "cuda:0", "0,1"),
        (["1"], 8, "4,6", ["6"], "cuda:0", "6"),
        ([], 8, "", ["cpu"], "cpu", ""),
        (["GPU-12ab"], 1, None, ["GPU-12ab"], "cuda:0", "GPU-12ab"),
    ],
)
def test_devices_are_pinned(  # noqa: PLR0917 - one column each
    devices: list[str], gpus: int, before: str | None, pinned: list[str], device: str, after: str
) -> None:
    environ = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    assert pin(check_devices(devices), environ=environ, gpus=gpus) == (pinned, device)
    assert environ["CUDA_VISIBLE_DEVICES"] == after


@pytest.mark.parametrize(
    ("devices", "gpus", "message"),
    [
        (["gpu"], 1, "unknown"),
        (["0", "0"], 1, "twice"),
        (["cpu", "0"], 1, "mix"),
        (["0"], 0, "no GPU 0: this machine has none"),
        (["2"], 2, "no GPU 2; visible: 0 to 1"),
    ],
)
def test_wrong_devices_are_named(devices: list[str], gpus: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pin(check_devices(devices), environ={}, gpus=gpus)


def test_gpus_are_counted_without_cuda(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path) == 2
