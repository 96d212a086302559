"""``omniq doctor``: does this machine have what omniq needs, and what will it use?"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import click

from omniq import __version__
from omniq.compat import real_vllm_omni
from omniq.config import get_pipeline
from omniq.engines.registry import AUTO, reason, resolve, vllm_installed
from omniq.errors import OmniqError
from omniq.runtime.broker import server_binary
from omniq.runtime.external import check_server
from omniq.runtime.machine import memory_line
from omniq.settings import get_settings

OK, WARN, BAD = "ok", "warn", "BAD"
Finding = tuple[str, str]

REQUIRED = ("celery", "kombu", "redis", "fastapi", "pydantic")
OPTIONAL = {
    "torch": "omniq[diffusion]",
    "transformers": "omniq[diffusion]",
    "diffusers": "omniq[diffusion]",
    "vllm": "omniq[vllm]",
    "flower": "omniq[monitor]",
    "honcho": "omniq[monitor]",
}
#: Packages that make DiT stages faster or smaller, and what runs without them.
ACCELERATORS = {
    "flash_attn": "attention_backend flash needs it",
    "sageattention": "attention_backend sage needs it",
    "torchao": "quantization_config with torchao needs it",
    "cache-dit": "dit.cache uses diffusers' hooks",
    "xfuser": "parallel uses diffusers' context parallelism (xDiT is not needed)",
}
SMALL_SHM = 256 << 20
"""Docker's default of 64 MiB is too small for tensors."""


@click.command()
def doctor() -> None:
    """Check Python, packages, broker, shared memory, devices; exit code 1 if omniq cannot run."""
    broken = False
    for check in (
        *(_python, _packages, _accelerators, _broker, _shared_memory, _devices, _engines),
        _vllm_omni,
    ):
        for level, text in _all(check):
            broken |= level == BAD
            click.secho(f"{level:>4}  {text}", fg={OK: None, WARN: "yellow", BAD: "red"}[level])
    if broken:
        sys.exit(1)


def _all(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What a check finds; what stops it is a finding, and no reason to leave the others out."""
    try:
        yield from check()
    except OmniqError as exc:
        yield BAD, exc.message


def installed(name: str) -> str | None:
    """Version of an installed package. vLLM for CPU has a distribution name of its own."""
    for distribution in (name, f"{name}-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _python() -> Iterator[Finding]:
    good = sys.version_info >= (3, 11)
    yield OK if good else BAD, f"omniq {__version__}, Python {platform.python_version()}"
    yield OK, f"{platform.platform()}; {memory_line()}"


def _packages() -> Iterator[Finding]:
    for name in REQUIRED:
        found = installed(name)
        yield OK if found else BAD, f"{name} {found or 'is not installed'}"
    for name, extra in OPTIONAL.items():
        found = installed(name)
        yield OK if found else WARN, f"{name} {found or f'is not installed ({extra})'}"


def _accelerators() -> Iterator[Finding]:
    for name, without in ACCELERATORS.items():
        found = installed(name)
        yield OK, f"accelerator {name} {found or f'is not installed: {without}'}"


def _broker() -> Iterator[Finding]:
    settings = get_settings()
    try:
        if settings.embedded:
            yield OK, f"embedded Valkey on port {settings.broker_port}: {server_binary()}"
        else:
            for line in check_server(settings.redis_url):
                yield WARN if line.startswith("WARNING") else OK, line
    except OmniqError as exc:
        yield BAD, f"{exc.message}; {exc.hint}"
    if settings.blob_redis_url is not None:
        try:
            yield OK, f"for blobs: {check_server(settings.blob_url)[0]}"
        except OmniqError as exc:
            yield BAD, f"for blobs: {exc.message}; check OMNIQ_BLOB_REDIS_URL"


def _shared_memory() -> Iterator[Finding]:
    settings = get_settings()
    if not settings.shm_dir.is_dir():
        yield WARN, f"{settings.shm_dir} does not exist: tensors travel through Redis, slower"
        return
    usage = shutil.disk_usage(settings.shm_dir)
    small = usage.total < SMALL_SHM
    advice = "; larger with `docker run --shm-size`, or OMNIQ_BLOB_STORE=redis" if small else ""
    size = f"{usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free"
    yield WARN if small else OK, f"shared memory {settings.shm_dir}: {size}{advice}"


def _devices() -> Iterator[Finding]:
    if installed("torch") is None:
        return
    import torch  # noqa: PLC0415 - slow, and may be absent

    if not torch.cuda.is_available():
        yield OK, f"torch {torch.__version__}: no GPU, {torch.get_num_threads()} CPU threads"
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield OK, f"GPU {index}: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def _engines() -> Iterator[Finding]:
    """Which engine each stage of the default pipeline gets here, which one AR stages get, why."""
    device = _device()
    pipeline = get_pipeline(get_settings().default_pipeline)
    for stage in pipeline.stages:
        where = f"{pipeline.name}/{stage.stage_id} on {device}"
        try:
            spec = resolve(stage.engine_type, stage.engine, device)
        except OmniqError as exc:
            yield BAD, f"{where}: {exc.message}"
            continue
        why = reason(stage.engine_type, device) if stage.engine == AUTO else "as configured"
        missing = spec.missing()
        yield BAD if missing else OK, f"{where}: engine {spec.name} ({missing or why})"
    served = "vllm" if vllm_installed() else "transformers"
    why = "vLLM is installed" if vllm_installed() else "vLLM is not installed (omniq[vllm])"
    yield OK, f"`omniq serve` of a language model: engine {served} ({why})"


def _vllm_omni() -> Iterator[Finding]:
    """Who answers `vllm serve --omni`."""
    if (found := real_vllm_omni()) is not None:
        yield (
            WARN,
            f"vllm-omni {found} is installed: `vllm serve --omni` and `vllm-omni` are its; "
            "omniq's command is `omniq serve`",
        )
    elif vllm_installed():
        yield OK, "`vllm serve MODEL --omni` and `vllm-omni serve MODEL` are `omniq serve MODEL`"


def _device() -> str:
    if installed("torch") is None:
        return "cpu"
    import torch  # noqa: PLC0415 - slow, and may be absent

    return "cuda:0" if torch.cuda.is_available() else "cpu"
