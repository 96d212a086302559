"""The errors omniq raises, each with a stable ``code`` that clients can match on.

Engines raise :class:`EngineError` and its subclasses; everything else comes from omniq's own parts.
``retryable`` says whether the same work may succeed when it is tried again unchanged.
"""

from __future__ import annotations

from typing import Any


class OmniqError(Exception):
    """Base of all omniq errors.

    ``code`` is a stable machine-readable name, ``hint`` says what the reader can do about it.
    """

    code = "error"
    retryable = False

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def to_dict(self) -> dict[str, Any]:
        """JSON form kept in the job record and sent to clients."""
        body: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.hint:
            body["hint"] = self.hint
        if self.details:
            body["details"] = self.details
        return body


class ConfigError(OmniqError):
    """A pipeline file, a setting or a stage configuration is wrong."""

    code = "invalid_config"


class InvalidRequest(OmniqError):
    """A request cannot be served as written.

    ``fields`` lists every fault as ``{"field": "parameters.width", "message": "..."}``.
    """

    code = "invalid_request"

    def __init__(self, message: str, *, fields: list[dict[str, str]] | None = None) -> None:
        super().__init__(message)
        self.fields = fields or []
        if self.fields:
            self.details = {"fields": self.fields}


class InputTooLarge(InvalidRequest):
    """A file among the inputs has more bytes or pixels than are allowed."""

    code = "input_too_large"


class UnsupportedInput(InvalidRequest):
    """A file among the inputs is of a kind that the pipeline does not take."""

    code = "unsupported_input"


class UnknownPipeline(InvalidRequest):
    """No pipeline of that name is configured."""

    code = "unknown_pipeline"


class JobNotFound(OmniqError):
    """No job with that id (it never existed, or its retention has passed)."""

    code = "job_not_found"


class ArtifactNotFound(OmniqError):
    """The job has no artifact of that name (yet, or any more)."""

    code = "artifact_not_found"


class JobGone(JobNotFound):
    """There was a job with that id; it is no longer kept."""

    code = "job_gone"


class PipelineChanged(OmniqError):
    """A job's pipeline has other stages than when the job was accepted."""

    code = "pipeline_changed"


class JobUnreadable(OmniqError):
    """A job's record was written by another version of omniq and says what this one cannot read."""

    code = "job_unreadable"


class IdempotencyConflict(OmniqError):
    """The idempotency key was used for a request that asked for something else."""

    code = "idempotency_conflict"


class Refused(OmniqError):
    """A job was not let in: nothing of it is kept.

    Args:
        limit: stable name of the limit that is reached.
        value: of the limit.
        size: what there is at present.
        retry_after: seconds after which there will be room, as far as can be told.
    """

    retryable = True
    whose = ""

    def __init__(self, limit: str, value: float, size: float, retry_after: float) -> None:
        super().__init__(
            f"{self.whose} limit {limit} is reached: at most {value:g}, at present {size:g}",
            hint=f"try again in {max(1, round(retry_after))} s",
            limit=limit,
            value=value,
            size=size,
            retry_after=retry_after,
        )
        self.limit, self.value, self.size, self.retry_after = limit, value, size, retry_after


class Overloaded(Refused):
    """The system has no room for another job now."""

    code = "overloaded"
    whose = "the system's"


class ShareUsed(Refused):
    """The tenant has used up its share for now."""

    code = "share_used"
    whose = "your"


class DeadLetterNotFound(OmniqError):
    """No dead letter with that id (any more)."""

    code = "dead_letter_not_found"


class DeadLetterLost(OmniqError):
    """The dead letter cannot be tried again."""

    code = "dead_letter_lost"


class JobFailed(OmniqError):
    """A job ended as failed, cancelled or expired; raised where a caller waits for its result."""

    code = "job_failed"


class BrokerUnavailable(OmniqError):
    """Redis/Valkey cannot be reached or refuses writes."""

    code = "broker_unavailable"
    retryable = True


class BlobError(OmniqError):
    """A blob cannot be written or read."""

    code = "blob_error"


class BlobNotFound(BlobError):
    """The blob is in no store this process can reach."""

    code = "blob_not_found"


class BlobTooLarge(BlobError):
    """The blob is larger than its store accepts."""

    code = "blob_too_large"


class BlobCorrupt(BlobError):
    """The bytes under a blob's key are not the blob that was written."""

    code = "blob_corrupt"


class StoreFull(BlobError):
    """The store has no room for the blob now."""

    code = "store_full"
    retryable = True


class EngineError(OmniqError):
    """A stage's engine failed on this request."""

    code = "engine_error"


class EngineOutOfMemory(EngineError):
    """The device had too little memory for this request."""

    code = "engine_out_of_memory"
    retryable = True


class EngineDead(EngineError):
    """The engine can serve nothing more; the worker gives its tasks back and exits."""

    code = "engine_dead"
    retryable = True


class StageTimeout(EngineError):
    """A stage ran longer than its time limit."""

    code = "stage_timeout"


class DeadlineExceeded(StageTimeout):
    """The job's deadline passed before its end."""

    code = "deadline_exceeded"


class NotReady(OmniqError):
    """A part that is needed cannot serve: a stage has no ready worker in time, or what another
    version of omniq has written cannot be read.
    """

    code = "not_ready"
    retryable = True
