"""The Celery application: ``celery -A omniq worker|inspect|call|flower|report``.

Everything Celery keeps in Redis carries the namespace (queues, unacknowledged messages, results,
remote control, events), so that two systems may share one database. Importing this module imports
no model code; the worker's own classes are named by path and loaded by workers only.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from celery import Celery
from kombu.utils.objects import cached_property

from omniq import keys
from omniq.redis_client import CONNECT_TIMEOUT
from omniq.settings import Settings, get_settings

if TYPE_CHECKING:
    from omniq.tasks import StageRunner

#: Queue priorities: 0 is served first (Celery's and kombu's order on Redis).
PRIORITIES = range(10)
#: kombu's mark between a queue's name and a priority above 0.
PRIORITY_SEPARATOR = "\x06\x16"
#: What a publisher waits for each answer, in seconds.
SOCKET_TIMEOUT = 5.0

_CACHED = ("amqp", "control", "events")


def celery_priority(priority: int) -> int:
    """Celery's priority (0 first) of a job's (9 first)."""
    return PRIORITIES[-1] - priority


def queue_key(queue: str, priority: int) -> str:
    """The Redis list that holds one queue's messages of one of Celery's priorities."""
    priority = min(max(priority, PRIORITIES[0]), PRIORITIES[-1])
    return f"{queue}{PRIORITY_SEPARATOR}{priority}" if priority else queue


def queue_keys(queue: str) -> list[str]:
    """The Redis lists that hold one queue's messages, one per priority, first served first."""
    return [queue_key(queue, p) for p in PRIORITIES]


def configuration(settings: Settings) -> dict[str, Any]:
    """Celery's settings that follow from omniq's."""
    namespace = settings.namespace
    return {
        "broker_url": settings.url,
        "result_backend": settings.url,
        # -- messages ---------------------------------------------------------------------------
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        "task_default_queue": keys.control_queue(),
        "task_default_exchange": keys.control_queue(),
        "task_default_routing_key": keys.control_queue(),
        # What names no priority is control work: it goes before stage tasks.
        "task_default_priority": PRIORITIES[0],
        "task_inherit_parent_priority": True,
        "control_exchange": f"{namespace}.pidbox",
        "event_exchange": keys.event_exchange(),
        "event_queue_prefix": f"{namespace}.events",
        # -- delivery ---------------------------------------------------------------------------
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "worker_deduplicate_successful_tasks": True,
        # Tasks go on running through a broker restart and settle by their new delivery
        # (omniq_workers.pool); cancelling them instead would waste the work, and makes the worker
        # exit when the result backend is away as well.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_enable_prefetch_count_reduction": False,
        "worker_detect_quorum_queues": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_connection_timeout": CONNECT_TIMEOUT,
        "broker_transport_options": {
            "priority_steps": list(PRIORITIES),
            "queue_order_strategy": "priority",
            "visibility_timeout": settings.visibility_timeout,
            # kombu restores what is overdue every 10 x 10 s by default.
            "unacked_restore_interval": min(1.0, settings.visibility_timeout / 8),
            "unacked_restore_throttle": 1,
            "unacked_key": keys.unacked(),
            "unacked_index_key": f"{namespace}:unacked_index",
            "unacked_mutex_key": f"{namespace}:unacked_mutex",
            "socket_connect_timeout": CONNECT_TIMEOUT,
            "socket_timeout": SOCKET_TIMEOUT,
            "socket_keepalive": True,
            # A publisher learns at once that there is no broker; kombu would wait for it. Workers
            # have their own patience (omniq_workers.consumer).
            "max_retries": 0,
        },
        # -- worker -----------------------------------------------------------------------------
        # The -P option accepts only Celery's own pools.
        "worker_pool": "omniq_workers.pool:EnginePool",
        "worker_consumer": "omniq_workers.consumer:StageConsumer",
        "worker_concurrency": 1,
        "worker_prefetch_multiplier": 1,
        "worker_send_task_events": True,
        "worker_redirect_stdouts": False,
        "worker_log_format": "%(asctime)s %(levelname)s %(name)s: %(message)s",
        "worker_task_log_format": "%(asctime)s %(levelname)s %(name)s: %(message)s",
        "task_send_sent_event": True,
        # -- results ----------------------------------------------------------------------------
        "result_extended": True,
        "result_expires": settings.retention,
        "result_backend_transport_options": {
            "global_keyprefix": f"{namespace}:",
            "retry_policy": {"timeout": SOCKET_TIMEOUT},
        },
        "redis_socket_connect_timeout": CONNECT_TIMEOUT,
        "redis_socket_timeout": SOCKET_TIMEOUT,
        "timezone": "UTC",
    }


class OmniqCelery(Celery):
    """A Celery application configured by omniq's settings, whose workers are omniq's."""

    amqp_cls = "omniq.signing:SignedAMQP"
    #: Set by the worker process that has an engine: what runs stage tasks, and the engine's life.
    stage_runner: StageRunner | None = None
    service: Any = None
    #: Whether publishers announce each task by an event.
    announces: bool = True
    _settings: Settings | None = None

    @cached_property
    def Worker(self) -> type:
        """Worker program, also of ``celery -A omniq worker``."""
        worker: type = self.subclass_with_self("omniq_workers.worker:StageWorker", name="Worker")
        return worker

    def follow_settings(self) -> OmniqCelery:
        """Take over the process's present settings (another broker or namespace) if they changed.

        Called before every use by code that may run under several settings in one process, such as
        :func:`omniq.chain.build`.
        """
        settings = get_settings()
        if settings is not self._settings:
            self.conf.update(configuration(settings))
            self.announces = bool(self.conf.task_send_sent_event)
            # Whatever was built from the old settings: pools of connections, queue tables, mailbox.
            self._pool = None
            self._backend_cache = None
            self._local = threading.local()
            for name in _CACHED:
                self.__dict__.pop(name, None)
            self._settings = settings
        return self


def create_app(name: str, *, include: list[str]) -> OmniqCelery:
    """An application of that name with the tasks of the modules in ``include``."""
    return OmniqCelery(name, include=include, set_as_current=False).follow_settings()


app = create_app("omniq", include=["omniq.tasks"])
