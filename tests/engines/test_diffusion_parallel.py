"""Context parallelism: two processes compute what one does, and end together."""

from __future__ import annotations

import asyncio
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
from engine_helpers import Recorder, loaded
from support import wait_until
from tiny_families import make

from omniq.engines import create_engine
from omniq.errors import ConfigError, EngineDead, EngineError

TWO = {"context_parallel": {"ulysses_degree": 2}}
EVEN = {"context_parallel": {"ulysses_degree": 2, "ulysses_anything": False}}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("flux", tmp_path_factory.mktemp("families") / "flux")


@pytest.fixture
async def even(flux: Path) -> AsyncIterator[Any]:
    """A stage of two processes for even sequences."""
    engine: Any = await loaded(dit_stage(flux, engine_args=EVEN))
    yield engine
    await engine.unload()


def follower(engine: Any) -> Any:
    ((process, _),) = engine.part._group._followers
    return process


@pytest.mark.parametrize("name", ["flux", "qwen_image", "wan"])
async def test_two_processes_give_what_one_gives(name: str, tmp_path: Path) -> None:
    """Several sizes, odd and even text lengths, guidance, and requests that take turns."""
    model = make(name, tmp_path / name)
    kinds: list[tuple[dict[str, Any], int]] = [
        ({}, 8),
        ({"width": 64}, 7),
        ({**cfg(name, 3.0)}, 5),
    ]
    results = []
    for args in ({}, TWO):
        engine: Any = await loaded(dit_stage(model, engine_args=args))
        outputs = await asyncio.gather(
            *(
                send(
                    engine,
                    params(name, **{"num_inference_steps": 3, "seed": i, **more}),
                    request_id=str(i),
                    condition=condition(name, tokens, i),
                )
                for i, (more, tokens) in enumerate(kinds)
            )
        )
        results.append([latents_of(o) for o in outputs])
        process = follower(engine) if args else None
        await engine.unload()
        assert process is None or process.poll() is not None, "followers end with the engine"
    assert not torch.distributed.is_initialized()
    for alone, together in zip(*results, strict=True):
        torch.testing.assert_close(together, alone, rtol=0, atol=2e-5)


async def test_a_request_that_fails_everywhere_fails_alone(even: Any) -> None:
    with pytest.raises(EngineError, match="divisible") as caught:
        await send(even, params("flux"), condition=condition("flux", 7))
    assert not isinstance(caught.value, EngineDead)
    output = await send(even, params("flux"), condition=condition("flux", 8))
    assert latents_of(output).isfinite().all()


async def test_a_follower_that_died_idle_ends_the_engine(even: Any) -> None:
    os.kill(follower(even).pid, signal.SIGKILL)
    follower(even).wait()
    with pytest.raises(EngineDead, match=r"rank 1 of 2 \(process \d+\) is dead, exit code -9"):
        await send(even, params("flux"), condition=condition("flux", 8))


async def test_a_follower_that_dies_at_work_ends_the_engine(even: Any) -> None:
    """All requests in flight learn it, and none hangs."""
    pid = follower(even).pid

    class Killer(Recorder):
        def progress(self, step: int, total: int) -> None:
            super().progress(step, total)
            if step == 2:
                os.kill(pid, signal.SIGKILL)

    emit = Killer()
    many = params("flux", num_inference_steps=50)
    ended = await asyncio.wait_for(
        asyncio.gather(
            send(even, many, emit, request_id="a", condition=condition("flux", 8)),
            send(even, many, request_id="b", condition=condition("flux", 8)),
            return_exceptions=True,
        ),
        60,
    )
    assert [type(e) for e in ended] == [EngineDead, EngineDead]
    assert 2 <= len(emit.steps) < 50


OWNER = """
import asyncio, sys
from pathlib import Path
from diffusion_helpers import dit_stage
from omniq.engines import create_engine

args = {"context_parallel": {"ulysses_degree": 2}}
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
        assert running(pid)
        owner.kill()
    wait_until(lambda: not running(pid))


def running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    status = Path(f"/proc/{pid}/status")
    try:
        return "\nState:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("args", "dit", "says"),
    [
        ({"ulysses_degree": 1}, {}, "ulysses_degree: .*2"),
        ({"ring_degree": 2}, {}, "ulysses_degree: .*required"),
        ({"ulysses_degree": 3, "ulysses_anything": False}, {}, "does not divide the model's 2"),
        ({"ulysses_degree": 2}, {"cache": {"preset": "fast"}}, "does not go with dit.cache"),
        ({"ulysses_degree": 2}, {"loras": {"a": "b"}}, "does not go with dit.loras"),
    ],
    ids=str,
)
async def test_wrong_arguments_are_refused_at_load(
    flux: Path, args: dict[str, Any], dit: dict[str, Any], says: str
) -> None:
    engine = create_engine(dit_stage(flux, engine_args={"context_parallel": args}, dit=dit))
    with pytest.raises(ConfigError, match=f"(?s)'dit': engine_args context_parallel.*{says}"):
        await engine.load()
    await engine.unload()


async def test_what_does_not_go_together_is_refused_at_load(flux: Path, tmp_path: Path) -> None:
    """Sleep needs all ranks, and Z-Image has no plan in diffusers."""
    for model, more, says in (
        (flux, {"sleep_after": 1}, "does not go with sleep_after"),
        (flux, {"attention_backend": "flash"}, "does not go with attention_backend"),
        (make("z_image", tmp_path / "z"), {}, "no plan to split ZImageTransformer2DModel"),
    ):
        engine = create_engine(dit_stage(model, engine_args={**TWO, **more}))
        with pytest.raises(ConfigError, match=says):
            await engine.load()
        await engine.unload()
