"""Celery's ``revoke`` of a stage's task that has not begun is the cancellation of its job.

Celery keeps revoked ids in the memory of the workers that were there; one that is started later
runs the task all the same. And the job would wait for ever for a task that was dropped. Its record
keeps that it was cancelled, whoever gets the message.
"""

from __future__ import annotations

from typing import Any

from celery.signals import task_revoked
from celery.utils.functional import maybe_list
from celery.worker import control

from omniq.publish import STAGE

_revoke = control.revoke


@control.control_command(variadic="task_id", signature="[id1 [id2 [... [idN]]]]")
def revoke(
    state: Any, task_id: Any, terminate: bool = False, signal: str | None = None, **kwargs: Any
) -> Any:
    """Revoke task by task id (or list of ids).

    Keyword Arguments:
        terminate (bool): Also terminate the process if the task is active.
        signal (str): Name of signal to use for terminate (e.g., ``KILL``).
    """
    answer = _revoke(state, task_id, terminate=terminate, signal=signal, **kwargs)
    for one in maybe_list(task_id) or []:
        _cancel(state.app, str(one))
    return answer


@task_revoked.connect
def dropped(
    sender: Any, request: Any, terminated: bool = False, expired: bool = False, **_: Any
) -> None:
    """A worker has dropped a task that was revoked before it came."""
    if sender.name == STAGE and not terminated and not expired:
        _cancel(sender.app, str(request.id))


def _cancel(app: Any, task_id: str) -> None:
    """Cancel the job of a task that has omniq's id (:func:`omniq.chain.task_id`)."""
    job, *rest = task_id.split(".")
    runner = getattr(app, "stage_runner", None)
    if rest and runner is not None:
        app.service.pool.loop.spawn(runner.revoked(job, rest[0]))
