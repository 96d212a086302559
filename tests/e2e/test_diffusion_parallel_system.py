"""A stage of two processes in a real system: a dead follower costs a worker, not the job."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
import pytest
import torch
from omniq_process import OmniqProcess, StartOmniq, alive, descendants, omniq_processes
from support import Valkey, wait_until
from tiny_families import make

from omniq import AsyncOmniLLM
from omniq.config.loader import available_pipelines
from omniq.settings import get_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PIPELINE = """
name: parallel
inputs:
  prompt: {{type: text}}
stages:
  - {{stage_id: encode, engine_type: encode, model: {model}, dtype: float32}}
  - stage_id: dit
    engine_type: DiT
    model: {model}
    dtype: float32
    devices: [cpu]
    engine_args: {args}
    defaults: {{height: 32, width: 32, num_inference_steps: 4, guidance_scale: 1.0}}
edges:
  - {{from: input.prompt, to: encode.prompt}}
  - {{from: encode.condition, to: dit.condition}}
outputs:
  latents: {{from: dit.latents, type: latents}}
"""


async def test_a_worker_whose_follower_died_ends_and_its_job_is_done_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same result; a worker's end takes its follower along."""
    model = make("flux", tmp_path / "flux")
    args = json.dumps({"parallel": {"ulysses_degree": 2}})
    file = tmp_path / "parallel.yaml"
    file.write_text(PIPELINE.format(model=model, args=args))
    server = Valkey(tmp_path)
    server.start()
    monkeypatch.setenv("OMNIQ_PIPELINES", json.dumps([str(file)]))
    monkeypatch.setenv("OMNIQ_BROKER_URL", server.url)
    get_settings.cache_clear()
    available_pipelines.cache_clear()
    try:
        with omniq_processes(tmp_path) as start:
            workers = {stage: started(start, stage) for stage in ("encode", "dit")}
            async with AsyncOmniLLM("parallel") as llm:
                before = await llm.generate("a cat", seed=1)
                (follower,) = followers(workers["dit"])
                follower.kill()
                again = asyncio.create_task(llm.generate("a cat", seed=1))
                assert await asyncio.to_thread(workers["dit"].process.wait, 60) == 1
                assert "rank 1 of 2" in workers["dit"].output()
                workers["dit"] = started(start, "dit")
                after = await again
            (follower,) = followers(workers["dit"])
            for worker in workers.values():
                worker.process.terminate()
            assert [w.process.wait(15) for w in workers.values()] == [0, 0]
            assert not alive([follower])
    finally:
        server.stop()
        get_settings.cache_clear()
        available_pipelines.cache_clear()
    torch.testing.assert_close(
        torch.as_tensor(after.latents["latents"]), torch.as_tensor(before.latents["latents"])
    )


def started(start: StartOmniq, stage: str) -> OmniqProcess:
    """A worker of that stage, ready."""
    worker = start("worker", "--pipeline", "parallel", "--stage", stage, "--devices", "cpu")
    wait_until(
        lambda: "stage_ready" in worker.output() or worker.process.poll() is not None,
        120,
        f"stage {stage} is ready",
    )
    assert worker.process.poll() is None, worker.output()
    return worker


def followers(worker: OmniqProcess) -> list[psutil.Process]:
    below = descendants(worker.process.pid)
    return [p for p in below if "omniq.engines.diffusion.follower" in p.cmdline()]
