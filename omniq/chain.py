"""A job as Celery messages: a chain of its stages, or linked signatures for a graph.

Messages carry names only (job, stage, an excerpt of the prompt); a stage's inputs come from the job
record. Whoever delivers a stage's message twice does no harm: the job store decides what runs.
"""

from __future__ import annotations

from celery import chain, group
from celery.canvas import Signature

from omniq import keys
from omniq.celery import app, celery_priority
from omniq.config import PipelineConfig
from omniq.jobs.model import JobSpec
from omniq.tasks import STAGE

EXCERPT_CHARS = 60


def build(spec: JobSpec, pipeline: PipelineConfig) -> Signature:
    """The signature whose ``apply_async`` starts the job.

    A linear pipeline is a Celery ``chain``. In any other graph each stage's signature is linked to
    those of the stages behind it. A join is linked by every stage that feeds it: it arrives once
    per parent, and all but the last arrival find an input missing and end (``Verdict.WAIT``), so no
    chord waits for it and no worker is held.
    """
    app.follow_settings()
    order = pipeline.topological_order()
    if pipeline.is_linear:
        steps = [_stage(spec, stage) for stage in order]
        return chain(*steps, app=app) if len(steps) > 1 else steps[0]
    roots = [_linked(spec, pipeline, s, None) for s in order if not pipeline.upstream(s)]
    return group(roots, app=app) if len(roots) > 1 else roots[0]


def task_id(job_id: str, stage: str, parent: str | None = None) -> str:
    """Celery's id of a stage's task; a join has one for each parent that sends it."""
    return f"{job_id}.{stage}.{parent}" if parent else f"{job_id}.{stage}"


def excerpt(spec: JobSpec) -> str:
    """The start of the job's first text input, for people."""
    text = next((v for v in spec.inputs.values() if isinstance(v, str)), "")
    line = " ".join(text[: 4 * EXCERPT_CHARS].split())
    return line if len(line) <= EXCERPT_CHARS else line[: EXCERPT_CHARS - 1] + "…"


def _linked(spec: JobSpec, pipeline: PipelineConfig, stage: str, parent: str | None) -> Signature:
    signature = _stage(spec, stage, parent)
    for below in pipeline.downstream(stage):
        joined = len(pipeline.upstream(below)) > 1
        signature.link(_linked(spec, pipeline, below, stage if joined else None))
    return signature


def _stage(spec: JobSpec, stage: str, parent: str | None = None) -> Signature:
    prompt = excerpt(spec)
    return app.signature(
        STAGE,
        kwargs={"job": spec.id, "stage": stage, "prompt": prompt},
        task_id=task_id(spec.id, stage, parent),
        queue=keys.stage_queue(spec.pipeline, stage),
        priority=celery_priority(spec.priority),
        shadow=f"{spec.pipeline}.{stage}",
        # Shown by Flower and in logs in place of the arguments.
        argsrepr="()",
        kwargsrepr=f"job={spec.id} stage={stage} prompt={prompt!r}",
    )
