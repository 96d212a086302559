"""Which store a blob goes to and comes from, and what happens to blobs that nobody needs."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from omniq import keys
from omniq.blobs.base import BlobRef
from omniq.blobs.host import host_identity
from omniq.blobs.redis import RedisStore
from omniq.blobs.shm import available
from omniq.blobs.slabs import SlabStore as ShmStore
from omniq.errors import BlobError, BlobNotFound, BlobTooLarge, ConfigError, StoreFull
from omniq.jobs.model import JobState
from omniq.redis_client import broker_errors
from omniq.settings import get_settings

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Mode = Literal["auto", "shm", "redis"]

_PAGE = 256


class BlobRouter:
    """All blobs, as a worker or the API sees them. Blocking; safe to call from any thread.

    Methods raise :class:`~omniq.errors.BrokerUnavailable` where Redis is needed and cannot be used.

    Args:
        host: identity of this machine (:func:`omniq.blobs.host_identity`).
        shm: this host's shared memory; None where there is none.
        mode: where :meth:`put` writes, see ``settings.blob_store``. Reading is the same in all.
    """

    def __init__(
        self, host: str, shm: ShmStore | None, redis: RedisStore, mode: Mode = "auto"
    ) -> None:
        if mode == "shm" and shm is None:
            raise ConfigError("no shared memory to keep blobs in")
        self.host, self.shm, self.redis, self.mode = host, shm, redis, mode
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
            shm = ShmStore(folder, settings.namespace, host, settings.shm_max_bytes)
        elif mode == "shm":
            raise ConfigError(
                f"OMNIQ_BLOB_STORE is shm, but {folder} is no folder to write to",
                hint="set OMNIQ_SHM_DIR to a tmpfs, or OMNIQ_BLOB_STORE to auto",
            )
        return cls(host, shm, RedisStore.from_settings(), mode)

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
        if self.shm is not None and (
            self.mode == "shm" or (self.mode == "auto" and consumers_local)
        ):
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

    def _shm_of(self, ref: BlobRef) -> ShmStore | None:
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
                    self.redis.put_bytes(ref.id, self.shm.buffer(ref))
                except BlobNotFound:
                    continue  # freed meanwhile
                except (BlobTooLarge, StoreFull) as exc:
                    logger.warning("blob %s stays in shared memory: %s", ref.id, exc)
                    continue
                if wanted(job_of(ref.id)):
                    moved += 1
                else:  # it ended before the copy was there to be freed
                    self.redis.delete(ref)
            self.shm.delete(ref)
        self._count("spilled", moved)
        return moved

    def collect(self, wanted: Callable[[str], bool] | None = None) -> int:
        """Free this host's shared memory of ended jobs and of dead processes, for a timer.

        Args:
            wanted: as for :meth:`spill`.

        Returns:
            How many blobs were freed.
        """
        return self.collect_garbage() + self.sweep(wanted)

    def collect_garbage(self) -> int:
        """Free the blobs that ended jobs left to this host; returns how many."""
        if self.shm is None:
            return 0
        client, key = self.redis.client, keys.host_garbage(self.host)
        freed = 0
        cursor = 0
        while True:
            with broker_errors():
                cursor, entries = client.sscan(key, cursor, count=_PAGE)
            done = []
            for entry in entries:
                try:
                    freed += self.shm.delete(BlobRef.model_validate_json(entry))
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
                break
        self._count("collected", freed)
        return freed

    def sweep(self, wanted: Callable[[str], bool] | None = None) -> int:
        """Delete what dead processes of this host left and no unfinished job may read.

        ``wanted`` is as for :meth:`spill`; returns how many blobs were deleted.
        """
        if self.shm is None:
            return 0
        ask = wanted or self._unfinished
        swept = self.shm.sweep(lambda blob_id: ask(job_of(blob_id)))
        self._count("swept", swept)
        return swept

    def _unfinished(self, job_id: str) -> bool:
        with broker_errors():
            state = self.redis.client.hget(keys.job(job_id), "state")
        return state is not None and not JobState(state.decode()).final

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

    def close(self) -> None:
        """Let go of both stores; blobs stay (see :meth:`spill`)."""
        if self.shm is not None:
            self.shm.close()
        self.redis.close()

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what] += number


def job_of(blob_id: str) -> str:
    """The job that a blob belongs to."""
    return blob_id.partition(".")[0]
