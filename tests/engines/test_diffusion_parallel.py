"""Stages of several processes: they compute what one does, and end together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_helpers import cfg, condition, dit_stage, latents_of, params, send
from engine_helpers import Recorder
from support import wait_until
from tiny_families import make

from omniq.engines import create_engine
from omniq.errors import ConfigError, EngineDead, EngineError

TWO = {"parallel": {"ulysses_degree": 2}}
EVEN = {"parallel": {"ulysses_degree": 2, "ulysses_anything": False}}
CFG = {"parallel": {"cfg_degree": 2}}
RING = {"parallel": {"ring_degree": 2}}
BOTH = {"parallel": {"cfg_degree": 2, "ulysses_degree": 2}}
UNIFIED = {"parallel": {"ring_degree": 2, "ulysses_degree": 2}}
TOLERANCE = 2e-5
Kinds = list[tuple[dict[str, Any], int]]


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("flux", tmp_path_factory.mktemp("families") / "flux")


@contextlib.asynccontextmanager
async def running(
    model: Path, args: dict[str, Any], device: str = "cpu", **more: Any
) -> AsyncIterator[Any]:
    """A loaded stage; however it is left, it ends, and its followers with it."""
    engine: Any = create_engine(dit_stage(model, engine_args=args, **more), device)
    try:
        await engine.load()
        followers = [process for process, _ in engine.part._group._followers] if args else []
        yield engine
    finally:
        await engine.unload()
    assert all(process.poll() is not None for process in followers)
    assert not torch.distributed.is_initialized()


def follower(engine: Any) -> Any:
    ((process, _),) = engine.part._group._followers
    return process


def kinds(name: str, *, odd: bool) -> Kinds:
    """Several sizes, odd and even text lengths, guidance; requests that take turns."""
    return [
        ({}, 8),
        ({"width": 64}, 7 if odd else 12),
        (cfg(name, 3.0), 5 if odd else 8),
        (cfg(name, 2.0), 8),
    ]


async def made_by(
    model: Path, name: str, asked: Kinds, args: dict[str, Any], device: str = "cpu", **more: Any
) -> list[torch.Tensor]:
    """The latents of all requests, which come at once, by a stage of its own; it ends whole."""
    async with running(model, args, device, **more) as engine:
        outputs = await asyncio.gather(
            *(
                send(
                    engine,
                    params(name, **{"num_inference_steps": 3, "seed": i, **given}),
                    request_id=str(i),
                    condition=condition(name, tokens, i),
                )
                for i, (given, tokens) in enumerate(asked)
            )
        )
    return [latents_of(o) for o in outputs]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("flux", TWO),
        ("qwen_image", TWO),
        ("wan", TWO),
        ("flux", RING),
        pytest.param("qwen_image", RING, marks=slow),
        pytest.param("wan", RING, marks=slow),
        ("qwen_image", BOTH),
        pytest.param("flux", UNIFIED, marks=slow),
    ],
    ids=str,
)
async def test_several_processes_give_what_one_gives(
    name: str, args: dict[str, Any], tmp_path: Path
) -> None:
    """With tests/engines/test_diffusion_cfg_parallel.py, which looks closer at CFG."""
    model = make(name, tmp_path / name)
    asked = kinds(name, odd=args is not UNIFIED)
    alone, together = [await made_by(model, name, asked, a) for a in ({}, args)]
    torch.testing.assert_close(together, alone, rtol=0, atol=TOLERANCE)


async def half_precision(name: str, args: dict[str, Any], model: Path, device: str) -> None:
    """In bfloat16, sharing the work changes no more than rounding does.

    Compared with one device in bfloat16 and not with float32: torch draws other noise in bfloat16
    than in float32 on some processors. Rounding moves these models by up to 3 % of the largest
    latent, and both sides round.
    """
    asked = kinds(name, odd=False)
    alone, together = [
        await made_by(model, name, asked, a, device, dtype="bfloat16") for a in ({}, args)
    ]
    for one, several in zip(alone, together, strict=True):
        atol = 0.06 * float(one.abs().max())
        torch.testing.assert_close(several.float(), one.float(), rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("args", [TWO, RING, CFG], ids=str)
async def test_half_precision_is_no_less_exact(args: dict[str, Any], flux: Path) -> None:
    await half_precision("flux", args, flux, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("args", [TWO, RING, CFG], ids=str)
@pytest.mark.parametrize("name", ["flux", "qwen_image", "wan"])
async def test_two_gpus_are_no_less_exact_than_one(
    name: str, args: dict[str, Any], tmp_path: Path
) -> None:
    """Over NCCL; ring attention by cuDNN, which gives the logsumexp."""
    await half_precision(name, args, make(name, tmp_path / name), "cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("args", [TWO, CFG], ids=str)
@pytest.mark.parametrize("name", ["flux", "qwen_image", "wan"])
async def test_two_gpus_give_what_one_gives(
    name: str, args: dict[str, Any], tmp_path: Path
) -> None:
    """In float32, odd lengths included."""
    model = make(name, tmp_path / name)
    asked = kinds(name, odd=True)
    alone, together = [await made_by(model, name, asked, a, "cuda:0") for a in ({}, args)]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
@pytest.mark.parametrize("args", [BOTH, UNIFIED], ids=str)
async def test_four_gpus_are_no_less_exact_than_one(args: dict[str, Any], tmp_path: Path) -> None:
    model = make("qwen_image", tmp_path / "model")
    await half_precision("qwen_image", args, model, "cuda:0")


async def test_a_request_that_fails_everywhere_fails_alone_and_a_follower_that_died_ends_all(
    flux: Path,
) -> None:
    """The first on both ranks, for its odd sequence; the second while nothing is to be done."""
    async with running(flux, EVEN) as engine:
        with pytest.raises(EngineError, match="divisible") as caught:
            await send(engine, params("flux"), condition=condition("flux", 7))
        assert not isinstance(caught.value, EngineDead)
        output = await send(engine, params("flux"), condition=condition("flux", 8))
        assert latents_of(output).isfinite().all()
        os.kill(follower(engine).pid, signal.SIGKILL)
        follower(engine).wait()
        with pytest.raises(EngineDead, match=r"rank 1 of 2 \(process \d+\) is dead, exit code -9"):
            await send(engine, params("flux"), condition=condition("flux", 8))


@pytest.mark.parametrize("args", [EVEN, CFG], ids=str)
async def test_a_follower_that_dies_at_work_ends_the_engine(
    flux: Path, args: dict[str, Any]
) -> None:
    """All requests in flight learn it, and none hangs."""
    async with running(flux, args) as engine:
        pid = follower(engine).pid

        class Killer(Recorder):
            def progress(self, step: int, total: int) -> None:
                super().progress(step, total)
                if step == 2:  # of whichever comes first
                    os.kill(pid, signal.SIGKILL)

        emit = Killer()
        many = params("flux", num_inference_steps=50, **cfg("flux", 3.0))
        ended = await asyncio.wait_for(
            asyncio.gather(
                send(engine, many, emit, request_id="a", condition=condition("flux", 8)),
                send(engine, many, emit, request_id="b", condition=condition("flux", 8)),
                return_exceptions=True,
            ),
            60,
        )
        assert [type(e) for e in ended] == [EngineDead, EngineDead]
        assert "rank 1 of 2" in str(ended[0])
        assert 2 <= len(emit.steps) < 100


@pytest.mark.parametrize("parallel", [EVEN["parallel"], CFG["parallel"]], ids=str)
async def test_a_follower_that_hangs_ends_the_engine_after_the_timeout(
    flux: Path, parallel: dict[str, Any]
) -> None:
    async with running(flux, {"parallel": {**parallel, "timeout": 2}}) as engine:
        process = follower(engine)

        class Stopper(Recorder):
            def progress(self, step: int, total: int) -> None:
                super().progress(step, total)
                if step == 2:
                    process.send_signal(signal.SIGSTOP)

        emit = Stopper()
        many = params("flux", num_inference_steps=50, **cfg("flux", 3.0))
        with pytest.raises(EngineDead, match="rank 1"):
            await asyncio.wait_for(send(engine, many, emit, condition=condition("flux", 8)), 60)
        assert 2 <= len(emit.steps) < 50


OWNER = """
import asyncio, sys
from pathlib import Path
from diffusion_helpers import dit_stage
from omniq.engines import create_engine

args = {"parallel": {"ulysses_degree": 2}}
engine = create_engine(dit_stage(Path(sys.argv[1]), engine_args=args))
asyncio.run(engine.load())
((process, _),) = engine.part._group._followers
print("follower", process.pid, flush=True)
sys.stdin.read()
"""


def test_followers_end_with_a_killed_worker(flux: Path) -> None:
    """Or they would keep its devices."""
    tests = str(Path(__file__).parent.parent)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(flux)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": tests},
    )
    with owner:
        assert owner.stdout is not None
        line = next(line for line in owner.stdout if line.startswith("follower "))
        pid = int(line.split()[1])
        assert exists(pid)
        owner.kill()
    wait_until(lambda: not exists(pid))


def exists(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    status = Path(f"/proc/{pid}/status")
    try:
        return "\nState:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("args", "dit", "says"),
    [
        ({}, {}, "one of cfg_degree, ring_degree and ulysses_degree must be above 1"),
        ({"cfg_degree": 3}, {}, "cfg_degree: .*1 or 2"),
        ({"ulysses_degree": 0}, {}, "ulysses_degree: .*1"),
        ({"sp": 2}, {}, "sp: "),
        ({"cfg_degree": 2, "timeout": 0}, {}, "timeout: "),
        ({"cfg_degree": 2, "ring_anything": True}, {}, "ring_anything needs a ring_degree above 1"),
        (
            {"ring_degree": 2, "ulysses_degree": 2, "ulysses_anything": True},
            {},
            "ulysses_anything does not go with a ring_degree above 1",
        ),
        ({"ulysses_degree": 3, "ulysses_anything": False}, {}, "does not divide the model's 2"),
        ({"ulysses_degree": 2}, {"cache": {"preset": "fast"}}, "does not go with dit.cache"),
        ({"ulysses_degree": 2}, {"loras": {"a": "b"}}, "does not go with dit.loras"),
    ],
    ids=str,
)
async def test_wrong_arguments_are_refused_at_load(
    flux: Path, args: dict[str, Any], dit: dict[str, Any], says: str
) -> None:
    engine = create_engine(dit_stage(flux, engine_args={"parallel": args}, dit=dit))
    with pytest.raises(ConfigError, match=f"(?s)'dit': engine_args parallel.*{says}"):
        await engine.load()
    await engine.unload()


async def test_what_does_not_go_together_is_refused_at_load(flux: Path, tmp_path: Path) -> None:
    """Sleep needs all ranks, and Z-Image has no plan in diffusers."""
    for model, more, says in (
        (flux, {"sleep_after": 1}, "does not go with sleep_after"),
        (flux, {"compile_repeated_blocks": True}, "does not go with compile_repeated_blocks"),
        (make("z_image", tmp_path / "z"), {}, "no plan to split ZImageTransformer2DModel"),
    ):
        engine = create_engine(dit_stage(model, engine_args={**TWO, **more}))
        with pytest.raises(ConfigError, match=says):
            await engine.load()
        await engine.unload()
