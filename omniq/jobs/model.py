"""What a job is: its states, its record as clients see it, its events."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError

from omniq.blobs.base import BlobRef
from omniq.errors import InvalidRequest, JobUnreadable

#: Hint where a record cannot be read.
UPGRADE = "it may be another version's: upgrade this process, or retry the job there"


class JobState(StrEnum):
    """States of a job; the last four are final."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def final(self) -> bool:
        """Whether the job has ended."""
        return self in FINAL


FINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED})


class StageState(StrEnum):
    """States of one stage of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    RETRYING = "retrying"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


def new_job_id(now: float) -> str:
    """28 hex digits that sort by time: 48 bits of milliseconds, 64 random bits."""
    return f"{int(now * 1000):012x}{secrets.token_hex(8)}"


class JobSpec(BaseModel):
    """A validated request, as stored: everything a stage needs to run, whoever runs it."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(pattern=r"^[a-z0-9-]{1,64}$")
    pipeline: str
    pipeline_version: int = 1
    inputs: dict[str, Any] = Field(
        description="By name; of pictures and tensors only what they are like."
    )
    files: dict[str, BlobRef] = Field(
        default_factory=dict, description="Pictures and tensors, by the input's name."
    )
    parameters: dict[str, dict[str, Any]] = Field(description="Complete, by stage id.")
    stages: list[str] = Field(description="Stage ids in topological order.")
    priority: int = Field(5, ge=0, le=9, description="9 is served first.")
    tenant: str = Field("", description="Whose job it is; empty: nobody's in particular.")
    deadline: float | None = Field(None, description="Unix time after which nobody wants it.")
    metadata: dict[str, str] = Field(default_factory=dict, description="The client's own labels.")
    formats: dict[str, str] = Field(
        default_factory=dict, description="Of result files by output; default the pipeline's."
    )
    stream: bool = Field(
        True, description="Whether pieces of text are wanted while they are made (stage.delta)."
    )
    partial: dict[str, str] = Field(
        default_factory=dict,
        description="If some outputs are taken without the others: the stage of each, by output.",
    )
    created: float = Field(description="Unix time.")

    def to_json(self) -> bytes:
        """What is not at its default: workers that know less read requests that ask for no more.

        Raises:
            InvalidRequest: it holds what JSON cannot say, such as a lone surrogate.
        """
        try:
            return self.__pydantic_serializer__.to_json(self, exclude_defaults=True)
        except (PydanticSerializationError, UnicodeEncodeError) as exc:
            raise InvalidRequest(f"the request cannot be written as JSON: {exc}") from exc

    @classmethod
    def from_json(cls, text: bytes) -> JobSpec:
        """The inverse of :meth:`to_json`.

        Raises:
            JobUnreadable: not the JSON of a specification as this version knows them.
        """
        try:
            spec: JobSpec = cls.__pydantic_validator__.validate_json(text)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise JobUnreadable(
                f"the job's record is not one of this version of omniq: {where}: {first['msg']}",
                hint=UPGRADE,
            ) from exc
        return spec


class ArtifactInfo(BaseModel):
    """One stored result file."""

    name: str
    content_type: str
    nbytes: int
    key: str = Field(exclude=True, default="")
    meta: dict[str, Any] = Field(
        default_factory=dict,
        description="e.g. width, height; sequence: of a chunk of a result.",
    )

    @property
    def is_chunk(self) -> bool:
        """Whether it is one chunk of a result, sent ahead of the whole."""
        return "sequence" in self.meta


class StageRecord(BaseModel):
    """One stage of a job as clients see it. Times are Unix seconds."""

    state: StageState = StageState.QUEUED
    attempts: int = 0
    worker: str | None = None
    queued: float | None = None
    started: float | None = None
    finished: float | None = None
    step: int | None = None
    total: int | None = None
    metrics: dict[str, float | int] = Field(default_factory=dict)
    error: dict[str, Any] | None = None


class MissingOutput(BaseModel):
    """Why a job goes on, or has ended, without one of its outputs."""

    stage: str = Field(description="Which stage failed, or had not ended at the deadline.")
    error: dict[str, Any] = Field(description="`code`, `message` and more.")


class JobRecord(BaseModel):
    """One job as clients see it."""

    spec: JobSpec
    state: JobState
    started: float | None = None
    finished: float | None = None
    stages: dict[str, StageRecord]
    values: dict[str, Any] = Field(
        default_factory=dict, description="Small results by pipeline output name, e.g. text."
    )
    artifacts: dict[str, ArtifactInfo] = Field(default_factory=dict)
    missing: dict[str, MissingOutput] = Field(
        default_factory=dict, description="Outputs that it goes on, or has succeeded, without."
    )
    error: dict[str, Any] | None = None
    replayed: bool = Field(
        False, exclude=True, description="Whether an earlier request with this key has made it."
    )

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> JobRecord:
        """A record with these fields, those of its stages as they are or as text.

        Raises:
            pydantic.ValidationError: they are not those of a record.
        """
        record: JobRecord = cls.__pydantic_validator__.validate_python(fields)
        return record

    @property
    def id(self) -> str:
        """Job id."""
        return self.spec.id

    @property
    def partial(self) -> bool:
        """Whether it has succeeded without some of its outputs."""
        return self.state is JobState.SUCCEEDED and bool(self.missing)


class JobEvent(BaseModel):
    """One entry of a job's event stream.

    Types: ``job.queued``, ``job.started``, ``stage.started``, ``stage.progress`` (``step``,
    ``total``), ``stage.delta`` (``output``, ``value``; of an output made by chunks also
    ``sequence``, and ``artifact`` for tensors), ``stage.preview`` (``image``, ``step``,
    ``content_type``, ``width``, ``height``, ``url``: a data URL), ``stage.succeeded``,
    ``stage.retrying``, ``stage.requeued`` (its message was lost), ``stage.failed``,
    ``job.requeued`` (a dead letter is tried again),
    ``job.cancelling`` and one final
    ``job.succeeded|failed|cancelled|expired``; of a partial success with ``partial`` (true) and
    ``missing``, as :attr:`JobRecord.missing`.
    """

    id: str = Field(description="Redis stream id: the SSE event id, for resuming.")
    type: str
    stage: str | None = None
    time: float
    data: dict[str, Any] = Field(default_factory=dict)

    @property
    def final(self) -> bool:
        """Whether nothing can follow."""
        return self.type.startswith("job.") and self.type.removeprefix("job.") in FINAL


class Verdict(StrEnum):
    """What a worker that received a stage task must do with it."""

    RUN = "run"
    """Run it: the grant carries inputs and a fence."""
    DONE = "done"
    """Its output exists already (a redelivery): only send the continuation again."""
    WAIT = "wait"
    """Another input of a join is not there yet; the last one to arrive will bring its own task."""
    DUPLICATE = "duplicate"
    """Another live worker runs it."""
    STOP = "stop"
    """The job has ended or is being cancelled: nothing to run, nothing to continue."""


@dataclass(frozen=True, slots=True)
class StageGrant:
    """The answer to ``begin_stage``."""

    verdict: Verdict
    fence: int = 0
    attempt: int = 0
    spec: JobSpec | None = None
    upstream: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Outputs of the stages before it: stage id -> output name -> ``{'value': ...}`` or
    ``{'blob': BlobRef}``; ``{'stream': fence}``: chunks of that run."""
    outputs: dict[str, Any] = field(default_factory=dict)
    """With DONE: its own outputs."""
    state: JobState | None = None
    unreadable: JobUnreadable | None = None
    """Why there is no specification though there is a job."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The states of a job and of one of its stages, '' if it has none such; of a later version they
    may be none of :class:`JobState` and :class:`StageState`.
    """

    job: str
    stage: str
    attempts: int


@dataclass(slots=True)
class StageResult:
    """What a finished stage run hands to the job store.

    ``outputs``: output name -> ``{"value": json}`` or ``{"blob": {...BlobRef}}``; ``values`` and
    ``artifacts`` are the pipeline outputs made from this stage.
    """

    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    blobs: list[BlobRef] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, ArtifactInfo] = field(default_factory=dict)
    metrics: dict[str, float | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer to ``finish_stage``; true if the outputs were taken."""

    recorded: bool
    garbage: list[str]
    """References (JSON) of blobs in the shared memory of the caller's host that it may free now."""
    known: bool = False
    """Whether those who send know that the caller has room for another message."""

    def __bool__(self) -> bool:
        return self.recorded
