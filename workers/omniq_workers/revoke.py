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
        job, _, rest = str(one).partition(".")
        if rest:  # a stage's, as omniq names it (omniq.chain.task_id)
            _cancel(state.app, job, rest.partition(".")[0])
    return answer


@task_revoked.connect
def dropped(request: Any = None, terminated: bool = False, expired: bool = False, **_: Any) -> None:
    """A worker has dropped a task that was revoked before it came."""
    if request is None or terminated or expired or request.name != STAGE:
        return
    kwargs = request.kwargs
    if isinstance(kwargs, dict) and {"job", "stage"} <= set(kwargs):
        _cancel(request.app, kwargs["job"], kwargs["stage"])


def _cancel(app: Any, job: str, stage: str) -> None:
    runner = getattr(app, "stage_runner", None)
    if runner is not None:
        app.service.pool.loop.spawn(runner.revoked(job, stage))
