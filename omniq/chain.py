"""A job as Celery messages: a chain of its stages, or linked signatures for a graph.

Messages carry names only (job, stage, an excerpt of the prompt); a stage's inputs come from the job
record. Whoever delivers a stage's message twice does no harm: the job store decides what runs.
"""

from __future__ import annotations

from typing import Any

from celery import chain, group
from celery.canvas import Signature

import omniq.tasks  # noqa: F401 - gives the application its tasks
from omniq import keys
from omniq.celery import app, celery_priority
from omniq.config import PipelineConfig
from omniq.errors import PipelineChanged
from omniq.jobs.model import JobSpec
from omniq.publish import STAGE, Parent, Post, post

EXCERPT_CHARS = 60


def first_posts(spec: JobSpec, pipeline: PipelineConfig) -> list[Post]:
    """The messages that start the job, as :func:`build` and ``apply_async`` would send them."""
    app.follow_settings()
    pipeline = pipeline.only(spec.stages)
    if pipeline.is_linear:
        first, *behind = [_stage(spec, stage) for stage in pipeline.topological_order()]
        return [post(first, chain=behind[::-1] or None)]
    return [post(root) for root in _roots(spec, pipeline)]


def build(spec: JobSpec, pipeline: PipelineConfig) -> Signature:
    """The signature whose ``apply_async`` starts the job.

    A linear pipeline is a Celery ``chain``. In any other graph each stage's signature is linked to
    those of the stages behind it. A join is linked by every stage that feeds it. omniq's workers
    send it once, with its last input; others send it once per parent, and all but the last arrival
    find an input missing and end (``Verdict.WAIT``). No chord waits for it, no worker is held.
    """
    app.follow_settings()
    pipeline = pipeline.only(spec.stages)
    if pipeline.is_linear:
        steps = [app.signature(_stage(spec, stage)) for stage in pipeline.topological_order()]
        return chain(*steps, app=app) if len(steps) > 1 else steps[0]
    roots = [app.signature(root) for root in _roots(spec, pipeline)]
    return group(roots, app=app) if len(roots) > 1 else roots[0]


def early_post(
    spec: JobSpec, pipeline: PipelineConfig, stage: str, sender: str, parent: Parent
) -> Post:
    """The message that starts ``stage`` of a running job ahead of its turn, with all that comes
    behind. ``sender`` makes its task id differ from that of the stage's own message.
    """
    pipeline = pipeline.only(spec.stages)
    if not pipeline.is_linear:
        return post(_linked(spec, pipeline, stage, sender), parent=parent)
    order = pipeline.topological_order()
    behind = [_stage(spec, s) for s in order[order.index(stage) + 1 :]]
    return post(_stage(spec, stage, sender), chain=behind[::-1] or None, parent=parent)


def served(spec: JobSpec, pipeline: PipelineConfig) -> PipelineConfig:
    """The part of the pipeline that the job needs.

    Raises:
        PipelineChanged: it has other stages than when the job was accepted.
    """
    if set(spec.stages) <= set(pipeline.topological_order()):
        part = pipeline.only(spec.stages)
        if part.topological_order() == spec.stages:
            return part
    raise PipelineChanged(
        f"pipeline {pipeline.name} has other stages than when job {spec.id} was accepted: it needs "
        f"{', '.join(spec.stages)}; there are {', '.join(pipeline.topological_order())}"
    )


def post_again(spec: JobSpec, pipeline: PipelineConfig, stage: str) -> Post:
    """The message that starts ``stage`` of a job whose own was lost, with all that comes behind."""
    app.follow_settings()
    pipeline = pipeline.only(spec.stages)
    if not pipeline.is_linear:
        return post(_linked(spec, pipeline, stage, None))
    order = pipeline.topological_order()
    behind = [_stage(spec, s) for s in order[order.index(stage) + 1 :]]
    return post(_stage(spec, stage), chain=behind[::-1] or None)


def task_id(job_id: str, stage: str, parent: str | None = None) -> str:
    """Celery's id of a stage's task; a join has one for each parent that sends it."""
    return f"{job_id}.{stage}.{parent}" if parent else f"{job_id}.{stage}"


def excerpt(spec: JobSpec) -> str:
    """The start of the job's first text input, for people."""
    text = next((v for v in spec.inputs.values() if isinstance(v, str)), "")
    line = " ".join(text[: 4 * EXCERPT_CHARS].split())
    return line if len(line) <= EXCERPT_CHARS else line[: EXCERPT_CHARS - 1] + "…"


def _roots(spec: JobSpec, pipeline: PipelineConfig) -> list[dict[str, Any]]:
    order = pipeline.topological_order()
    return [_linked(spec, pipeline, s, None) for s in order if not pipeline.upstream(s)]


def _linked(
    spec: JobSpec, pipeline: PipelineConfig, stage: str, parent: str | None
) -> dict[str, Any]:
    signature = _stage(spec, stage, parent)
    below = pipeline.downstream(stage)
    if below:
        signature["options"]["link"] = [
            _linked(spec, pipeline, s, stage if len(pipeline.upstream(s)) > 1 else None)
            for s in below
        ]
    return signature


def _stage(spec: JobSpec, stage: str, parent: str | None = None) -> dict[str, Any]:
    prompt = excerpt(spec)
    return {
        "task": STAGE,
        "args": (),
        "kwargs": {"job": spec.id, "stage": stage, "prompt": prompt},
        "options": {
            "task_id": task_id(spec.id, stage, parent),
            "queue": keys.stage_queue(spec.pipeline, stage),
            "priority": celery_priority(spec.priority),
            "shadow": f"{spec.pipeline}.{stage}",
            # Shown by Flower and in logs in place of the arguments.
            "argsrepr": "()",
            "kwargsrepr": f"job={spec.id} stage={stage} prompt={prompt!r}",
        },
        "subtask_type": None,
        "immutable": False,
    }
