"""What a real CUDA device does when it fails, and what workers are told of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_helpers import condition, dit_stage, held, latents_of, params, send
from tiny_families import make

from omniq.engines import create_engine
from omniq.engines.faults import engine_faults
from omniq.errors import EngineError, EngineOutOfMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="only a CUDA device fails so"),
]

#: Each leaves the context of its process broken, the last with an error that CUDA did not name.
LOST = {
    "an index out of range": """
        torch.nn.functional.embedding(torch.tensor([9], device="cuda"), table)
        torch.cuda.synchronize()
    """,
    "what comes after it, by cuBLAS": """
        try:
            torch.nn.functional.embedding(torch.tensor([9], device="cuda"), table)
            torch.cuda.synchronize()
        except RuntimeError:
            pass
        linear(table)
        torch.cuda.synchronize()
    """,
    "a plain error at a time when the device is lost": """
        torch.nn.functional.embedding(torch.tensor([9], device="cuda"), table)
        raise ValueError("of a library")
    """,
}
PROGRAM = """
import textwrap, torch
from omniq.engines.faults import engine_faults
table, linear = torch.zeros(4, 4, device="cuda"), torch.nn.Linear(4, 4, device="cuda")
linear(table)
try:
    with engine_faults("denoise step"):
        exec(textwrap.dedent({work!r}))
except Exception as exc:
    print(type(exc).__name__, "|", exc)
"""


@pytest.mark.parametrize("work", LOST.values(), ids=LOST.keys())
def test_a_lost_device_ends_the_engine(work: str) -> None:
    """In a process of its own: nothing runs on the device of that process afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(work=work)],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("EngineDead | denoise step: the device failed: "), done
    assert "device-side assert" in done.stdout


def test_memory_that_is_not_there_is_the_requests_fault() -> None:
    with (
        pytest.raises(EngineOutOfMemory, match="out of memory") as caught,
        engine_faults("denoise step"),
    ):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert caught.value.retryable
    assert torch.ones(2, device="cuda").sum() == 2


def test_pinned_memory_that_is_not_there_is_the_requests_fault() -> None:
    """CUDA's own allocator says so by an AcceleratorError, as of a lost device."""
    with pytest.raises(EngineOutOfMemory), engine_faults("denoise step"):
        torch.empty(1 << 45, dtype=torch.uint8, pin_memory=True)
    assert torch.ones(2, device="cuda").sum() == 2


def test_an_error_of_cuda_that_breaks_nothing_is_the_requests_fault() -> None:
    with (
        pytest.raises(EngineError, match="invalid device ordinal") as caught,
        engine_faults("denoise step"),
    ):
        torch.zeros(1, device="cuda:99")
    assert type(caught.value) is EngineError
    assert torch.ones(2, device="cuda").sum() == 2


@pytest.fixture
def little_memory() -> Iterator[None]:
    """So little device memory for this process that eight requests at once have too little."""
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


async def test_a_batch_without_room_is_computed_in_parts(
    little_memory: None, tmp_path: Path
) -> None:
    """Eight requests come at once, each gets the picture that it gets alone."""
    asked = params("flux", width=512, height=512, num_inference_steps=2)
    engine: Any = create_engine(dit_stage(make("flux", tmp_path / "flux")), "cuda:0")
    await engine.load()
    try:

        async def one(seed: int) -> torch.Tensor:
            given = {**asked, "seed": seed}
            return latents_of(await send(engine, given, condition=condition("flux", 8, seed)))

        async def eight() -> list[torch.Tensor]:
            async with held(engine) as go:
                tasks = [asyncio.create_task(one(seed)) for seed in range(8)]
                await asyncio.sleep(0.5)
                go.set()
                return await asyncio.gather(*tasks)

        alone = [await one(seed) for seed in range(8)]
        needed = []
        for work in (one(0), eight()):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            await work
            needed.append(torch.cuda.max_memory_reserved())
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(sum(needed) / 2 / total)
        ran_out = torch.cuda.memory_stats()["num_ooms"]
        together = await eight()
        assert torch.cuda.memory_stats()["num_ooms"] > ran_out
        for expected, got in zip(alone, together, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    finally:
        await engine.unload()
