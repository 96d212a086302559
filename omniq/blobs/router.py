"""Which store a blob goes to and comes from, and what happens to blobs that nobody needs."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from omniq import keys
from omniq.blobs.base import BlobRef, BlobStore
from omniq.blobs.choice import BlobUse, Mode, Where, choose
from omniq.blobs.host import host_identity
from omniq.blobs.redis import RedisStore
from omniq.blobs.redis_sweep import RedisSweep
from omniq.blobs.slabs import SlabStore, available
from omniq.errors import BlobError, BlobNotFound, BlobTooLarge, ConfigError, StoreFull
from omniq.jobs.model import JobState
from omniq.jobs.scripts import call, sources
from omniq.redis_client import broker_errors
from omniq.settings import get_settings

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_PAGE = 256


class BlobRouter:
    """All blobs, as a worker or the API sees them. Blocking; safe to call from any thread.

    Methods raise :class:`~omniq.errors.BrokerUnavailable` where Redis is needed and cannot be used.

    Args:
        host: identity of this machine (:func:`omniq.blobs.host_identity`).
        shm: this host's shared memory; None where there is none.
        mode: where :meth:`put` writes, see ``settings.blob_store``. Reading is the same in all.
        jobs: redis-py client of the server that keeps the jobs; default: that of the blobs. Closed
            with the router.
    """

    def __init__(
        self,
        host: str,
        shm: SlabStore | None,
        redis: RedisStore,
        mode: Mode = "auto",
        jobs: Any = None,
    ) -> None:
        if mode == "shm" and shm is None:
            raise ConfigError("no shared memory to keep blobs in")
        self.host, self.shm, self.redis, self.mode = host, shm, redis, mode
        self._jobs: Any = jobs or redis.client
        self._redis_sweep = RedisSweep(redis, self._jobs)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @classmethod
    def from_settings(cls) -> BlobRouter:
        """The router that the settings describe; touches neither store yet.

        Raises:
            ConfigError: ``blob_store`` is ``shm``, and ``shm_dir`` cannot be used.
        """
        settings = get_settings()
        folder, mode = settings.shm_dir, settings.blob_store
        host = host_identity(folder)
        shm = None
        if available(folder):
            shm = SlabStore(folder, settings.namespace, host, settings.shm_max_bytes)
        elif mode == "shm":
            raise ConfigError(
                f"OMNIQ_BLOB_STORE is shm, but {folder} is no folder to write to",
                hint="set OMNIQ_SHM_DIR to a tmpfs, or OMNIQ_BLOB_STORE to auto",
            )
        jobs = None if settings.blob_redis_url is None else RedisStore.broker_client()
        return cls(host, shm, RedisStore.from_settings(), mode, jobs)

    # -- one blob ----------------------------------------------------------------------------

    def put(
        self, blob_id: str, tensors: Mapping[str, torch.Tensor], consumers_local: bool
    ) -> BlobRef:
        """Write a blob where its consumers can read it.

        Args:
            blob_id: ``<job id>.<stage>.<fence>.<output>``; job ids hold no dot.
            tensors: any device; copied once.
            consumers_local: whether whoever will read it runs on this host.

        Raises:
            BlobTooLarge: above the chosen store's limit for one blob.
            StoreFull: no room now.
            BlobError: a tensor cannot be stored.
        """
        choice = choose(
            self.mode,
            shared_memory=self.shm is not None,
            consumers=Where.SAME_HOST if consumers_local else Where.OTHER_HOSTS,
        )
        if choice.store == "shm":
            assert self.shm is not None, "the mode shm is refused where there is none"
            try:
                ref = self.shm.put(blob_id, tensors)
            except (BlobTooLarge, StoreFull) as exc:
                if self.mode == "shm":
                    raise
                logger.warning("blob %s goes to Redis: %s", blob_id, exc)
            else:
                self._count("put_shm")
                return ref
        ref = self.redis.put(blob_id, tensors)
        self._count("put_redis")
        return ref

    def get(self, ref: BlobRef) -> dict[str, torch.Tensor]:
        """Read a blob; its tensors are read-only and stay valid when it is deleted.

        Raises:
            BlobNotFound: deleted, or it lies in the shared memory of another host.
            BlobCorrupt: it is not what was written.
        """
        if (shm := self._shm_of(ref)) is not None:
            try:
                tensors = shm.get(ref)
            except BlobNotFound:
                pass  # moved to Redis when its writer stopped, or gone
            else:
                self._count("get_shm")
                return tensors
        try:
            tensors = self.redis.get(ref)
        except BlobNotFound as exc:
            if ref.store == "shm" and ref.host != self.host:
                raise BlobNotFound(
                    f"blob {ref.id} lies in the shared memory of host {ref.host}, "
                    f"and this is host {self.host}",
                    hint="OMNIQ_BLOB_STORE=redis serves consumers on all hosts",
                ) from exc
            raise
        self._count("get_redis")
        return tensors

    def delete(self, ref: BlobRef) -> bool:
        """Free a blob; False if it is in no store that this process reaches.

        Of False and a ``ref.host`` that is not this one the caller informs that host
        (:func:`omniq.keys.host_garbage`).
        """
        shm = self._shm_of(ref)
        return (shm is not None and shm.delete(ref)) or self.redis.delete(ref)

    def _shm_of(self, ref: BlobRef) -> SlabStore | None:
        return self.shm if ref.store == "shm" and ref.host == self.host else None

    # -- many blobs --------------------------------------------------------------------------

    def spill(self, wanted: Callable[[str], bool] | None = None) -> int:
        """Empty this process's shared memory, for a worker that stops.

        What unfinished jobs may still read moves to Redis; what Redis does not take stays, readable
        on this host as long as its job is unfinished.

        Args:
            wanted: says of a job id whether the job is unfinished; by default its record does.

        Returns:
            How many blobs were moved.
        """
        if self.shm is None:
            return 0
        wanted = wanted or self._unfinished
        moved = 0
        for ref in self.shm.own():
            if wanted(job_of(ref.id)):
                try:
                    copy = self.redis.put_bytes(ref.id, self.shm.buffer(ref))
                except BlobNotFound:
                    continue  # freed meanwhile
                except (BlobTooLarge, StoreFull) as exc:
                    logger.warning("blob %s stays in shared memory: %s", ref.id, exc)
                    continue
                if wanted(job_of(ref.id)) and self._freed_with_job(copy):
                    moved += 1
                else:  # it ended before the copy was there to be freed
                    self.redis.delete(ref)
            self.shm.delete(ref)
        self._count("spilled", moved)
        return moved

    def collect(self, wanted: Callable[[str], bool] | None = None) -> int:
        """Free what ended jobs and dead processes have left on this host, and what dead writers
        have left in Redis; for a timer.

        Args:
            wanted: as for :meth:`spill`.

        Returns:
            How many blobs were freed.
        """
        return self.collect_garbage() + self.sweep(wanted) + self._sweep_redis()

    def collect_garbage(self) -> int:
        """Free the blobs that ended jobs left to this host, and to the server for blobs only.

        Returns:
            How many.
        """
        freed = 0
        if self.shm is not None:
            freed += self._collect_from(self.shm, self.host)
        if self.redis.garbage_host is not None:
            freed += self._collect_from(self.redis, self.redis.garbage_host)
        self._count("collected", freed)
        return freed

    def _collect_from(self, store: BlobStore, host: str) -> int:
        client, key = self._jobs, keys.host_garbage(host)
        freed = 0
        cursor = 0
        while True:
            with broker_errors():
                cursor, entries = client.sscan(key, cursor, count=_PAGE)
            done = []
            for entry in entries:
                try:
                    freed += store.delete(BlobRef.model_validate_json(entry))
                except ValidationError as exc:
                    logger.warning("no blob reference in %s: %s", key, exc)
                except BlobError as exc:
                    logger.warning("left to another worker: %s", exc)
                    continue
                done.append(entry)
            if done:  # only now: a worker that dies before here leaves them to the next
                with broker_errors():
                    client.srem(key, *done)
            if not cursor:
                return freed

    def sweep(self, wanted: Callable[[str], bool] | None = None) -> int:
        """Delete what dead processes of this host left, and this one lost, that no unfinished job
        may read.

        Lost are own blobs that no record names, so that no end of a job frees them: of a run that
        the broker's failure kept from saying what it had written.

        ``wanted`` is as for :meth:`spill`; returns how many blobs were deleted.
        """
        if self.shm is None:
            return 0
        ask = functools.cache(wanted or self._unfinished)  # most jobs have several blobs
        swept = 0
        for ref in self.shm.own():
            # Of a job that has just ended, its end's own freeing may come first.
            if not ask(job_of(ref.id)):
                swept += self.shm.delete(ref)
        swept += self.shm.sweep(lambda blob_id: ask(job_of(blob_id)))
        self._count("swept", swept)
        return swept

    def _sweep_redis(self) -> int:
        swept = self._redis_sweep.run()
        self._count("swept", swept)
        return swept

    def _unfinished(self, job_id: str) -> bool:
        with broker_errors():
            state = self._jobs.hget(keys.job(job_id), "state")
        return state is not None and not JobState(state.decode()).final

    def _freed_with_job(self, copy: BlobRef) -> bool:
        """Have a moved blob freed with its job; False: the job has ended.

        The job knows the blob as one in shared memory. Whoever ends it frees the copy on its own
        server too, but reaches no other one.
        """
        if self.redis.garbage_host is None:
            return True
        names, args = call(job_of(copy.id), [copy.to_json()])
        with broker_errors():
            return bool(self._jobs.eval(sources()["stream_leave"], len(names), *names, *args))

    # -- the rest ----------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Host, mode, what lies in shared memory, and what this router has done so far."""
        with self._lock:
            counts = dict(self._counts)
        return {
            "host": self.host,
            "mode": self.mode,
            "shm": None if self.shm is None else self.shm.stats(),
            "counts": counts,
        }

    def use(self) -> BlobUse:
        """What a worker reports of its blobs; needs no broker."""
        with self._lock:
            puts = {s: self._counts[f"put_{s}"] for s in ("shm", "redis")}
        use = BlobUse(mode=self.mode, shared_memory=self.shm is not None, puts=puts)
        if self.shm is None:
            return use
        stats = self.shm.stats()
        own = stats["own"]
        return use.model_copy(
            update={
                "slabs": own["extents"],
                "slab_bytes": own["bytes"],
                "used_bytes": own["used_bytes"],
                "blobs": stats["blobs"],
                "host_bytes": stats["bytes"],
                "max_bytes": stats["max_bytes"],
            }
        )

    def close(self) -> None:
        """Let go of both stores; blobs stay (see :meth:`spill`)."""
        if self.shm is not None:
            self.shm.close()
        self._jobs.close()
        self.redis.close()

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number


def job_of(blob_id: str) -> str:
    """The job that a blob belongs to."""
    return blob_id.partition(".")[0]
