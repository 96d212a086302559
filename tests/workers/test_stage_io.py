"""What a stage leaves for others: read and written with a real store, without a worker."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from omniq_workers.run import Run
from omniq_workers.stage_io import StageIO

from omniq import keys
from omniq.blobs import BlobRouter, host_identity
from omniq.config import get_pipeline
from omniq.engines.base import StageOutput
from omniq.jobs.model import StageGrant, Verdict
from omniq.jobs.store import JobStore
from omniq.jobs.workers import WorkerRegistry
from omniq.outputs import MultimodalOutputProcessor
from omniq.submit import submit


async def test_a_run_that_is_refused_leaves_no_result_file(broker: object) -> None:
    """Nor one whose job has ended: files outlive the record otherwise."""
    store, router = JobStore.from_settings(), BlobRouter.from_settings()
    io = stage_io("decode", store, router)
    job = await submit(store, pipeline="tiny-omni", inputs={"prompt": "x"})
    run = Run(job.id, "decode", StageGrant(Verdict.RUN, fence=7, spec=job.spec), cast("Any", None))
    try:
        result = await io.store(
            run, StageOutput(tensors={"image": {"image": torch.zeros(8, 8, 3, dtype=torch.uint8)}})
        )
        assert [a.key for a in result.artifacts.values()] == run.files != []
        kept = await store.put_artifact(job.id, "image", 8, b"the run that took over")
        await io.drop(run)
        assert await store.redis.keys("omniq:job:*:artifact:*") == [kept.encode()]
        assert await store.redis.smembers(keys.job_files(job.id)) == {kept.encode()}
    finally:
        router.close()
        await store.close()


def stage_io(stage: str, store: JobStore, router: BlobRouter) -> StageIO:
    return StageIO(
        get_pipeline("tiny-omni"),
        stage,
        router=router,
        processor=MultimodalOutputProcessor(),
        store=store,
        registry=WorkerRegistry(store.redis),
        host=host_identity(),
    )


@pytest.mark.parametrize(("outputs", "kept"), [(["text"], []), (None, ["hidden_states"])])
async def test_nothing_is_kept_for_stages_that_a_job_does_without(
    broker: object, outputs: list[str] | None, kept: list[str]
) -> None:
    store, router = JobStore.from_settings(), BlobRouter.from_settings()
    io = stage_io("ar", store, router)
    job = await submit(store, pipeline="tiny-omni", inputs={"prompt": "x"}, outputs=outputs)
    grant = await store.begin_stage(job.id, "ar", "w", redelivered=False)
    run = Run(job.id, "ar", grant, cast("Any", None))
    made = StageOutput(
        values={"text": "a circle"},
        tensors={"hidden_states": {"hidden_states": torch.zeros(4, 8)}},
    )
    try:
        result = await io.store(run, made)
        assert list(result.outputs) == kept
        assert len(result.blobs) == len(run.blobs) == len(kept)
        assert result.values == {"text": "a circle"}
    finally:
        router.close()
        await store.close()
