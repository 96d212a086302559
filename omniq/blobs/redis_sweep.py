"""Finding blobs in Redis that no end of a job frees: what a writer that died had not yet recorded.

Every write is noted on the server that has it, in the same transaction (:mod:`omniq.blobs.redis`),
and every way of freeing a blob takes its note away. So the notes name all that is there, whoever
wrote it and whatever became of that process: a worker that was killed between writing and
recording, one that stood still and writes after its job has ended, one whose run was taken over.
Whoever sweeps asks the job's record what of that may still be read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from omniq import keys
from omniq.blobs.redis import RedisStore
from omniq.config.pipeline import REQUEST
from omniq.errors import BlobError
from omniq.jobs.model import JobState
from omniq.redis_client import broker_errors
from omniq.settings import get_settings

_PAGE = 256
#: Looking takes at most this share of the time.
SHARE = 0.05
#: A job's input files are written before its record: for so many seconds they need none.
UNRECORDED = 600.0


class RedisSweep:
    """Of one store; any number may sweep, one does at a time.

    Args:
        store: where blobs are.
        jobs: redis-py client of the server that keeps the jobs.
    """

    def __init__(self, store: RedisStore, jobs: Any) -> None:
        self._store, self._jobs = store, jobs

    def run(self) -> int:
        """Free what nobody may read any more, unless that was done a moment ago.

        Returns:
            How many blobs, whole or half written.

        Raises:
            BrokerUnavailable: one of the servers cannot be used.
            BlobError: one of them refuses.
        """
        try:
            with broker_errors():
                return self._run()
        except ResponseError as exc:
            raise BlobError(f"Redis refuses to have its blobs swept: {exc}") from exc

    def _run(self) -> int:
        interval, client = get_settings().reconcile_interval, self._store.client
        key, began = keys.blob_sweeper(self._store.system), time.monotonic()
        # Not renewed: the next pass is whosever comes first then.
        if not client.set(key, "", nx=True, px=int(interval * 1000)):
            return 0
        swept = self._pass()
        pause = (time.monotonic() - began) / SHARE
        if pause > interval:
            client.pexpire(key, int(pause * 1000))
        return swept

    def _pass(self) -> int:
        settings, client, notes = get_settings(), self._store.client, self._store.notes
        swept = cursor = 0
        while True:
            cursor, page = client.hscan(notes, cursor, count=_PAGE)
            found = {note.decode(): int(nbytes) for note, nbytes in page.items()}
            if dead := self._unreadable(found):
                swept += self._store.drop_noted({note: found[note] for note in dead})
            if not cursor:
                break
        # Of a system that is gone for good nothing stays.
        client.pexpire(notes, int(max(settings.blob_ttl, settings.job_ttl) * 1000))
        return swept

    def _unreadable(self, notes: Iterable[str]) -> list[str]:
        """Those that no stage may read any more."""
        asked = [(note, _Writer.of(note)) for note in notes]
        pipe = self._jobs.pipeline(transaction=False)
        pipe.time()
        for _, by in asked:
            pipe.hmget(keys.job(by.job), "state", "dead", f"{by.stage}|fence")
        (now, _), *records = pipe.execute()
        return [
            note
            for (note, by), record in zip(asked, records, strict=True)
            if not _needed(by, now, *record)
        ]


class _Writer(NamedTuple):
    """What run has written something; of what is no run's the parts are empty."""

    job: str
    stage: str
    fence: int

    @classmethod
    def of(cls, note: str) -> _Writer:
        job_id, stage, fence, *_ = [*note.partition(":")[0].split(".", 3), "", ""]
        return cls(job_id, stage, int(fence) if fence.isdecimal() else 0)


def _needed(
    by: _Writer, now: float, state: bytes | None, dead: bytes | None, newest: bytes | None
) -> bool:
    """Whether a stage may still read what ``by`` wrote; ``now`` is by the server's clock, as the
    ids of jobs are; the rest is in the job's record, None where it is not.
    """
    if state is None:
        return by.stage == REQUEST and now < _created(by.job) + UNRECORDED
    if JobState(state.decode()).final:
        return by.stage == REQUEST and dead is not None  # the job may be tried again
    return by.fence >= int(newest or 0)  # else another run has taken over


def _created(job_id: str) -> float:
    """Unix time at which a job's id was made (:func:`omniq.jobs.model.new_job_id`); 0: unknown."""
    try:
        return int(job_id[:12], 16) / 1000
    except ValueError:
        return 0.0
