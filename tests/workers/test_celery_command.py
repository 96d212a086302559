"""The plain ``celery -A omniq`` command on a running worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support import wait_until

from omniq import keys
from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore
from omniq.tasks import cancel_job, submit_job


def celery(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "omniq", *args],
        capture_output=True, text=True, timeout=60, env=os.environ, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def test_it_inspects_reports_and_calls(stages: Any, store: JobStore) -> None:
    stages.define("a>b")
    stages.start("a", "b")
    assert celery("inspect", "ping", "--timeout", "3").count("pong") == 2
    queues = celery("inspect", "active_queues", "--timeout", "3")
    assert "omniq.p.a" in queues and "omniq.control" in queues
    assert "transport:redis" in celery("report")
    call = {
        "pipeline": "p", "inputs": {"prompt": "x"}, "priority": 7, "outputs": ["text"],
        "allow_partial": True, "stream": False, "formats": {}, "metadata": {"a": "b"},
        "webhook": {"url": "https://1.1.1.1/"},
    }  # fmt: skip
    task_id = celery("call", "omniq.submit", "--kwargs", json.dumps(call)).strip()
    started = submit_job.AsyncResult(task_id).get(timeout=10)
    assert started["stages"] == ["a", "b"] and started["pipeline"] == "p"
    record = await store.wait(started["id"], 10)
    assert record.state is JobState.SUCCEEDED
    spec = record.spec
    assert (spec.priority, spec.stream, spec.metadata) == (7, False, {"a": "b"})
    assert spec.partial == {"text": "b"}


def test_a_bad_submission_fails_clearly_and_once(
    stages: Any, pool_app: Any, celery_events: list[dict[str, Any]]
) -> None:
    stages.define("a>b")
    stages.start("a")
    for call, message in (
        ({"pipeline": "nope", "prompt": "x"}, "no pipeline 'nope'"),
        ({"pipeline": "p"}, "input.prompt: required"),
        ({"pipeline": "p", "prompt": "x", "parameters": {"width": 0}}, "unknown parameter"),
        ({"pipeline": "p", "prompt": "x", "inputs": {"prompt": "y"}}, "given twice"),
        ({"pipeline": "p", "prompt": "x", "timeout": "5"}, "timeout: must be seconds above 0"),
        ({"pipeline": ["p"], "prompt": "x"}, "pipeline: must be a name"),
        ({"pipeline": "p", "prompt": "x", "webhook": {"uri": "x"}}, "webhook.url: Field required"),
        ({"pipeline": "p", "prompt": "x", "outputs": ["sound"]}, "outputs: must be some of text"),
    ):
        result = submit_job.apply_async(kwargs=call)
        with pytest.raises(Exception, match=message):
            result.get(timeout=10)
        assert result.state == "FAILURE"
    assert "Traceback" not in stages.workers["a"].output()
    wait_until(lambda: [e["type"] for e in celery_events].count("task-failed") == 8, 5)
    assert not [e for e in celery_events if e["type"] == "task-retried"]


def test_a_submission_that_is_delivered_twice_starts_one_job(
    stages: Any, redis_client: redis.Redis
) -> None:
    """As after the death of a worker that had recorded the job and not yet said so."""
    stages.define("a>b")
    stages.start("a")
    found = []
    for _ in range(2):
        result = submit_job.apply_async(kwargs={"pipeline": "p", "prompt": "x"}, task_id="once")
        found.append(result.get(timeout=10)["id"])
        result.forget()
    assert found[0] == found[1]
    assert redis_client.zcard(keys.jobs_index()) == 1
    assert submit_job.delay("p", prompt="x").get(timeout=10)["id"] != found[0]


async def test_a_job_is_cancelled_by_a_task(
    stages: Any, store: JobStore, notes: Callable[..., list[str]]
) -> None:
    stages.define("a>b")
    stages.start("a")
    started = submit_job.delay("p", prompt="a:sleep=30").get(timeout=10)
    wait_until(lambda: notes("run a"))
    assert cancel_job.delay(started["id"]).get(timeout=10)["state"] == "cancelling"
    assert (await store.wait(started["id"], 5)).state is JobState.CANCELLED
    with pytest.raises(Exception, match="no job"):
        cancel_job.delay("unknown").get(timeout=10)


async def test_a_stage_revoked_in_celery_cancels_its_job(
    stages: Any, store: JobStore, notes: Callable[..., list[str]], pool_app: Any
) -> None:
    stages.define("a>b")
    stages.start("a")
    started = submit_job.delay("p", prompt="a:sleep=30").get(timeout=10)
    wait_until(lambda: notes("run a"))
    pool_app.app.control.revoke(f"{started['id']}.a", terminate=True)
    assert (await store.wait(started["id"], 5)).state is JobState.CANCELLED


async def test_celery_worker_serves_the_stage_whose_queue_it_gets(
    stages: Any, store: JobStore, spawn: Any
) -> None:
    stages.define("a")
    worker = spawn(
        "plain",
        [sys.executable, "-m", "celery", "-A", "omniq", "worker", "-l", "INFO", "-n", "w@test",
         "-Q", "omniq.p.a,omniq.control"],
        CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    worker.wait_for("stage_ready pipeline=p stage=a")
    started = submit_job.delay("p", prompt="x").get(timeout=10)
    assert (await store.wait(started["id"], 10)).state is JobState.SUCCEEDED
    assert worker.stop() == 0


def test_a_worker_without_a_stage_only_does_control_work(stages: Any, spawn: Any) -> None:
    stages.define("a")
    worker = spawn("w", [sys.executable, "-m", "celery", "-A", "omniq", "worker", "-l", "INFO"])
    worker.wait_for(" ready.")
    assert submit_job.delay("p", prompt="x").get(timeout=10)["stages"] == ["a"]


def test_ready_is_announced_as_a_celery_event(
    stages: Any, celery_events: list[dict[str, Any]]
) -> None:
    stages.define("a")
    stages.start("a")
    wait_until(lambda: {"stage-ready", "worker-online"} <= {e["type"] for e in celery_events}, 5)
    (event,) = [e for e in celery_events if e["type"] == "stage-ready"]
    assert (event["pipeline"], event["stage"]) == ("p", "a")
    online = next(e for e in celery_events if e["type"] == "worker-online")
    assert event["timestamp"] <= online["timestamp"]
