"""Every name omniq gives to something outside its own process: queues, Redis keys, channels.

The job id stands in braces so that a job's keys share one Redis Cluster slot.
"""

from __future__ import annotations

from omniq.settings import get_settings

CONTROL_QUEUE_SUFFIX = "control"


def _ns() -> str:
    return get_settings().namespace


def stage_queue(pipeline: str, stage: str) -> str:
    """Celery queue of one stage."""
    return f"{_ns()}.{pipeline}.{stage}"


def control_queue() -> str:
    """Celery queue of ``omniq.submit`` and other tasks that need no engine."""
    return f"{_ns()}.{CONTROL_QUEUE_SUFFIX}"


def event_exchange() -> str:
    """Exchange of Celery's events."""
    return f"{_ns()}.events"


def job(job_id: str) -> str:
    """Hash: the job's record."""
    return f"{_ns()}:job:{{{job_id}}}"


def end_channel(member: str) -> str:
    """Pub/sub channel: final records of jobs that somebody waits for."""
    return f"{_ns()}:ended:{member}"


def job_events(job_id: str) -> str:
    """Stream: what happened to the job, in order."""
    return f"{_ns()}:job:{{{job_id}}}:events"


def job_blobs(job_id: str) -> str:
    """Set: JSON references of the blobs the job holds."""
    return f"{_ns()}:job:{{{job_id}}}:blobs"


def job_files(job_id: str) -> str:
    """Set: keys of the result files that runs of the job have stored, in use or not."""
    return f"{_ns()}:job:{{{job_id}}}:files"


def job_streams(job_id: str) -> str:
    """Set: keys of the job's chunk streams and of their readers' positions."""
    return f"{_ns()}:job:{{{job_id}}}:streams"


def stream(job_id: str, stage: str, output: str) -> str:
    """Stream: the chunks of one output of a running stage."""
    return f"{_ns()}:job:{{{job_id}}}:stream:{stage}.{output}"


def stream_taken(job_id: str, stage: str, output: str, reader: str) -> str:
    """Stream of one entry: how many chunks the stage ``reader`` has done with."""
    return f"{_ns()}:job:{{{job_id}}}:taken:{stage}.{output}:{reader}"


def artifact(job_id: str, name: str, fence: int) -> str:
    """String: bytes of one artifact, written by the stage run that held ``fence``."""
    return f"{_ns()}:job:{{{job_id}}}:artifact:{name}:{fence}"


def jobs_index(tenant: str = "") -> str:
    """Sorted set: all job ids, or those of a tenant, by creation time."""
    return f"{_ns()}:jobs:{tenant}" if tenant else f"{_ns()}:jobs"


def jobs_gone(tenant: str = "") -> str:
    """Sorted set: ids of jobs, or a tenant's, that are no longer kept, by when that was found."""
    return f"{_ns()}:gone:{tenant}" if tenant else f"{_ns()}:gone"


def open_jobs(pipeline: str) -> str:
    """Sorted set: ids of a pipeline's jobs that have not ended, by creation time."""
    return f"{_ns()}:open:{pipeline}"


def held_tenants(pipeline: str) -> str:
    """Sorted set: tenants with jobs of the pipeline that are held back, by their turn."""
    return f"{_ns()}:pen:{pipeline}|waits"


def held_jobs(pipeline: str, tenant: str, level: int) -> str:
    """List: ids of a tenant's jobs that are held back, of one priority (0 is the highest)."""
    return f"{_ns()}:pen:{pipeline}|{tenant}|{level}"


def api_keys() -> str:
    """Hash: tenants' API keys, hashed, by their ids."""
    return f"{_ns()}:api_keys"


def api_closed() -> str:
    """String: there has been a tenant's key."""
    return f"{_ns()}:api_closed"


def pool_full(pipeline: str) -> str:
    """String with TTL: how full the shared memory of a host is that serves the pipeline."""
    return f"{_ns()}:full:{pipeline}"


def webhooks() -> str:
    """Sorted set: ids of jobs of whose end somebody is to be told, by when to try."""
    return f"{_ns()}:webhooks"


def reconciler(pipeline: str) -> str:
    """String with TTL: somebody looks after this pipeline's jobs (:mod:`omniq.jobs.reconcile`)."""
    return f"{_ns()}:reconciler:{pipeline}"


def unacked() -> str:
    """Hash: messages that workers hold, by delivery tag, as kombu notes them."""
    return f"{_ns()}:unacked"


def dead_letters() -> str:
    """Sorted set: ids of jobs that failed and may be tried again, by the time of the failure."""
    return f"{_ns()}:dead"


def undecodable() -> str:
    """List: what came by a queue and is no message, the newest first."""
    return f"{_ns()}:undecodable"


def cancel_channel() -> str:
    """Pub/sub channel: ids of jobs whose running stages must stop, each alone or with the only
    stage that must and the newest fence of its that must, between spaces.
    """
    return f"{_ns()}:cancel"


def worker(worker_id: str) -> str:
    """String with TTL: JSON status of one worker."""
    return f"{_ns()}:worker:{worker_id}"


def workers_index() -> str:
    """Sorted set: worker ids by the time they were last seen."""
    return f"{_ns()}:workers"


def waiting(queue: str) -> str:
    """Sorted set: who waits for messages of a queue, by how many each has room for."""
    return f"{_ns()}:waiting:{queue}"


def hears(member: str) -> str:
    """String with TTL: somebody who waits for messages still listens to :func:`hand_channel`."""
    return f"{_ns()}:hears:{member}"


def hand_channel(member: str) -> str:
    """Pub/sub channel: messages handed to somebody who waits for them."""
    return f"{_ns()}:hand:{member}"


def blob(blob_id: str) -> str:
    """String: one blob in the Redis store, or its first chunk."""
    return f"{_ns()}:blob:{blob_id}"


def blob_chunk(blob_id: str, number: int) -> str:
    """String: one chunk of a blob; all are in one Redis Cluster slot."""
    first = blob(blob_id)
    return f"{_ns()}:blob:{number}:{{{first}}}" if number else first


def blob_part(blob_id: str, token: str) -> str:
    """String: a chunk that one writer is still writing; in the blob's Redis Cluster slot."""
    return f"{_ns()}:part:{token}:{{{blob(blob_id)}}}"


def system() -> str:
    """String on the broker: a random name, by which other servers tell what is this system's."""
    return f"{_ns()}:system"


def blob_notes(system: str = "") -> str:
    """Hash: what is in the Redis store, and its bytes: blobs by id, and such as are still being
    written as ``<blob id>:<token>``; see :mod:`omniq.blobs.redis_sweep`. ``system``: whose, on a
    server of blobs alone, which other systems may use as well.
    """
    return f"{_ns()}:blobs:{system}" if system else f"{_ns()}:blobs"


def blob_sweeper(system: str = "") -> str:
    """String with TTL: somebody has looked for what dead writers left in the Redis store."""
    return f"{_ns()}:blob_sweeper:{system}" if system else f"{_ns()}:blob_sweeper"


def host_garbage(host: str) -> str:
    """Set: JSON references of blobs which no job needs any more.

    They lie in the shared memory of ``host``, or on a Redis server for blobs only
    (:data:`omniq.blobs.base.REDIS_HOST`).
    """
    return f"{_ns()}:garbage:{host}"


def idempotency(tenant: str, key: str) -> str:
    """String: what a tenant's request with an idempotency key has asked for, and its job."""
    return f"{_ns()}:idempotency:{tenant}:{key}"
