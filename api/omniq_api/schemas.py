"""What clients send and get: the API's own models, apart from how jobs are stored.

Times are Unix seconds. Every URL is a path on the same host.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from omniq.config import get_pipeline
from omniq.errors import UnknownPipeline
from omniq.jobs.model import ArtifactInfo, JobRecord, JobState, MissingOutput, StageRecord
from omniq.jobs.store import CURSOR
from omniq.jobs.webhooks import Webhook

MAX_KEYS = 64
MAX_METADATA = 16
WEEK = 7 * 86_400.0

EXAMPLE_ID = "0193a5c0de00a1b2c3d4e5f60718"
EXAMPLE_PROMPT = "a red circle above a blue square"


def _few_nested_keys(value: dict[str, Any]) -> dict[str, Any]:
    """Faults are reported per key, so their number is bounded before anything looks at them."""
    for key, inner in value.items():
        if isinstance(inner, dict) and len(inner) > MAX_KEYS:
            raise ValueError(f"{key[:64]!r} may have at most {MAX_KEYS} keys")
    return value


MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class JobRequest(BaseModel):
    """One request to a pipeline."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "pipeline": "tiny-omni",
                    "input": {"prompt": EXAMPLE_PROMPT},
                    "parameters": {"num_inference_steps": 20, "seed": 7},
                    "priority": 5,
                    "timeout": 60,
                    "metadata": {"user": "ada"},
                }
            ]
        },
    )

    pipeline: str = Field(max_length=64, description="A name that `GET /v1/pipelines` lists.")
    input: dict[str, Any] = Field(
        default_factory=dict,
        max_length=MAX_KEYS,
        description="The pipeline's inputs by name, e.g. `prompt`. A picture is a data: URL, the "
        'URL path of a result file, or `{"job": ID, "artifact": NAME}`; or send '
        "`multipart/form-data` with this object as the field `request` and each file under its "
        "input's name.",
    )
    parameters: Annotated[dict[str, Any], AfterValidator(_few_nested_keys)] = Field(
        default_factory=dict,
        max_length=MAX_KEYS,
        description="Parameters by name; each stage takes those it knows. An object under a stage "
        'id is for that stage only: `{"seed": 1, "ar": {"seed": 2}}`.',
    )
    outputs: list[str] | None = Field(
        None,
        min_length=1,
        max_length=MAX_KEYS,
        description="Only these of the pipeline's outputs; stages that none of them needs do not "
        "run. Default: all.",
    )
    allow_partial: bool = Field(
        False,
        strict=True,
        description="If a stage fails for good, or the deadline passes, the outputs that do "
        "without it are a success all the same: `partial`, with what is `missing`.",
    )
    formats: dict[str, str] = Field(
        default_factory=dict,
        max_length=MAX_KEYS,
        description='Of result files by output, e.g. `{"audio": "mp3"}`; default the pipeline\'s.',
    )
    priority: int = Field(5, ge=0, le=9, strict=True, description="9 is served first.")
    timeout: float | None = Field(
        None,
        gt=0,
        le=WEEK,
        allow_inf_nan=False,
        strict=True,
        description="A job that has not ended after so many seconds expires, wherever it is.",
    )
    metadata: dict[MetadataKey, MetadataValue] = Field(
        default_factory=dict,
        max_length=MAX_METADATA,
        description="Your own labels, returned with the job.",
    )
    webhook: Webhook | None = Field(
        None, description="Told of the job's end by a POST, as Standard Webhooks has it."
    )


class JobUrls(BaseModel):
    """Where the job goes on."""

    self: str
    events: str
    cancel: str


class ArtifactView(BaseModel):
    """One result file."""

    name: str
    content_type: str
    nbytes: int
    url: str
    meta: dict[str, Any] = Field(default_factory=dict)


class JobSummary(BaseModel):
    """A job in a list."""

    id: str
    pipeline: str
    state: JobState
    priority: int
    created: float
    started: float | None = None
    finished: float | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    error: dict[str, Any] | None = Field(None, description="`code`, `message` and more, if failed.")
    partial: bool = Field(False, description="Succeeded without some outputs, as was allowed.")
    urls: JobUrls


class JobView(JobSummary):
    """A job with all that is known of it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": EXAMPLE_ID,
                    "pipeline": "tiny-omni",
                    "pipeline_version": 1,
                    "state": "succeeded",
                    "priority": 5,
                    "created": 1764428400.1,
                    "started": 1764428400.2,
                    "finished": 1764428401.9,
                    "deadline": None,
                    "metadata": {"user": "ada"},
                    "error": None,
                    "urls": {
                        "self": f"/v1/jobs/{EXAMPLE_ID}",
                        "events": f"/v1/jobs/{EXAMPLE_ID}/events",
                        "cancel": f"/v1/jobs/{EXAMPLE_ID}/cancel",
                    },
                    "input": {"prompt": EXAMPLE_PROMPT},
                    "parameters": {"dit": {"num_inference_steps": 20, "seed": 7}},
                    "stages": {
                        "dit": {
                            "state": "succeeded",
                            "attempts": 1,
                            "started": 1764428400.9,
                            "finished": 1764428401.7,
                            "step": 20,
                            "total": 20,
                        }
                    },
                    "values": {"text": "A red circle above a blue square on a white background."},
                    "artifacts": [
                        {
                            "name": "image.png",
                            "content_type": "image/png",
                            "nbytes": 3184,
                            "url": f"/v1/jobs/{EXAMPLE_ID}/artifacts/image.png",
                            "meta": {"width": 64, "height": 64},
                        }
                    ],
                }
            ]
        }
    )

    pipeline_version: int
    deadline: float | None = None
    input: dict[str, Any]
    parameters: dict[str, dict[str, Any]] = Field(description="Complete, by stage.")
    stages: dict[str, StageRecord]
    values: dict[str, Any] = Field(description="Small results by output name, e.g. text.")
    artifacts: list[ArtifactView]
    missing: dict[str, MissingOutput] = Field(
        default_factory=dict,
        description="Outputs, by name, that the job goes on or has succeeded without.",
    )


class JobPage(BaseModel):
    """One page of jobs, newest first."""

    jobs: list[JobSummary]
    next: str | None = Field(None, description="Cursor of the next page; null on the last.")


class JobQuery(BaseModel):
    """Which jobs to list."""

    model_config = ConfigDict(extra="forbid")

    state: list[JobState] = Field(default_factory=list, max_length=len(JobState))
    pipeline: str | None = Field(None, max_length=64)
    limit: int = Field(50, ge=1, le=200)
    cursor: str | None = Field(
        None,
        description="`next` of the page before.",
        json_schema_extra={"pattern": CURSOR.pattern},
    )


class StageReadinessView(BaseModel):
    """Whether one stage can serve."""

    state: Literal["ready", "loading", "draining", "failed", "missing"]
    reason: str | None = Field(None, description="Why it is not ready.")
    workers: int
    ready_workers: int
    queue_length: int = Field(description="Tasks no worker has taken yet.")


class PipelineReadinessView(BaseModel):
    """Whether one pipeline can serve."""

    ready: bool
    open_jobs: int = Field(0, description="Unfinished jobs, also those held back.")
    stages: dict[str, StageReadinessView]


class ReadinessView(BaseModel):
    """Readiness of all served pipelines; `ready` is that of the default pipeline."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "ready": False,
                    "default_pipeline": "tiny-omni",
                    "pipelines": {
                        "tiny-omni": {
                            "ready": False,
                            "stages": {
                                "ar": {
                                    "state": "ready",
                                    "reason": None,
                                    "workers": 1,
                                    "ready_workers": 1,
                                    "queue_length": 0,
                                },
                                "dit": {
                                    "state": "loading",
                                    "reason": "loading weights",
                                    "workers": 1,
                                    "ready_workers": 0,
                                    "queue_length": 3,
                                },
                            },
                        }
                    },
                }
            ]
        }
    )

    ready: bool
    default_pipeline: str
    pipelines: dict[str, PipelineReadinessView]


class HealthView(BaseModel):
    """The process is alive."""

    status: Literal["ok"] = "ok"
    version: str


def job_urls(base: str, job_id: str) -> JobUrls:
    """URLs of a job; ``base`` is the path the API is mounted under, usually empty."""
    path = f"{base}/v1/jobs/{job_id}"
    return JobUrls(self=path, events=f"{path}/events", cancel=f"{path}/cancel")


def artifact_url(job_url: str, name: str) -> str:
    """URL of one result file of the job at ``job_url``."""
    return f"{job_url}/artifacts/{quote(name, safe='')}"


def job_summary(record: JobRecord, base: str) -> JobSummary:
    """A stored job as a list shows it."""
    return JobSummary(**_summary_fields(record, base))


def job_view(record: JobRecord, base: str) -> JobView:
    """A stored job as clients see it."""
    spec = record.spec
    fields = _summary_fields(record, base)
    return JobView(
        **fields,
        pipeline_version=spec.pipeline_version,
        deadline=spec.deadline,
        input=spec.inputs,
        parameters=spec.parameters,
        stages=record.stages,
        values=record.values,
        artifacts=[
            ArtifactView(
                name=name,
                content_type=info.content_type,
                nbytes=info.nbytes,
                url=artifact_url(fields["urls"].self, name),
                meta=info.meta,
            )
            for name, info in _in_order(record)
        ],
        missing=record.missing,
    )


def _in_order(record: JobRecord) -> list[tuple[str, ArtifactInfo]]:
    """Result files as the pipeline declares its outputs, several of one output by their numbers;
    of a pipeline that is not there any more, by name.
    """
    try:
        outputs = list(get_pipeline(record.spec.pipeline).outputs)
    except UnknownPipeline:
        outputs = []

    def place(item: tuple[str, ArtifactInfo]) -> tuple[int, str, float, str]:
        name, info = item
        # "image-2" is the third of "image", "image.2" the third chunk of it.
        output = name if name in outputs else re.sub(r"[.-]\d+$", "", name)
        at = outputs.index(output) if output in outputs else len(outputs)
        number = info.meta.get("sequence", info.meta.get("index", 0))
        return at, output, number if isinstance(number, int | float) else 0, name

    return sorted(record.artifacts.items(), key=place)


def _summary_fields(record: JobRecord, base: str) -> dict[str, Any]:
    spec = record.spec
    return {
        "id": spec.id,
        "pipeline": spec.pipeline,
        "state": record.state,
        "priority": spec.priority,
        "created": spec.created,
        "started": record.started,
        "finished": record.finished,
        "metadata": spec.metadata,
        "error": record.error,
        "partial": record.partial,
        "urls": job_urls(base, spec.id),
    }
