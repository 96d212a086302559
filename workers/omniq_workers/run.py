"""One run of one stage, from its grant to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from omniq.blobs.base import BlobRef
from omniq.jobs.model import JobSpec, StageGrant
from omniq.publish import Continuation, Parent
from omniq_workers.flight import Flight


@dataclass(frozen=True, slots=True)
class Ending:
    """What a run that succeeds returns to Celery, and what follows it."""

    message: str
    following: Continuation


@dataclass(eq=False)
class Run:
    """One granted run of one stage."""

    job_id: str
    stage: str
    grant: StageGrant
    flight: Flight
    unwanted: bool = False
    lost: bool = False
    """Released already, because a stage before that streams to it has to run again."""
    blobs: list[BlobRef] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """Keys of the result files that it has written."""
    ending: Ending | None = None
    """Set once the record has been asked to take the outputs."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Job, stage and fence: who the job store knows this run as."""
        return self.job_id, self.stage, self.grant.fence

    @property
    def spec(self) -> JobSpec:
        """The job's request."""
        assert self.grant.spec is not None, "a granted run carries the job's specification"
        return self.grant.spec

    @property
    def parent(self) -> Parent:
        """The run's task, as the messages it sends name it."""
        request = self.flight.delivery.request
        return Parent(
            id=self.flight.id,
            root=request.get("root_id") or self.flight.id,
            priority=(request.get("delivery_info") or {}).get("priority"),
        )

    def cancel(self) -> None:
        """Nobody wants the outcome any more; on the engine loop."""
        if not self.unwanted:
            self.unwanted = True
            if self.flight.future is not None:
                self.flight.future.cancel()

    def let_go(self) -> None:
        """The run has been released and is to stop; on the engine loop."""
        self.lost = True
        if self.flight.future is not None:
            self.flight.future.cancel()
