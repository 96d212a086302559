"""EnginePool under Celery's own features: one worker process, many tasks in flight."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from support import wait_until

Starter = Callable[..., Any]


def test_many_tasks_are_in_flight_in_one_process(
    start_pool: Starter, pool_app: Any, celery_events: list[dict[str, Any]]
) -> None:
    """Also: results, `inspect active`, and the runtimes that events tell."""
    start_pool()
    inspect = pool_app.app.control.inspect(destination=["w@test"], timeout=2)
    results = [pool_app.gen.delay(i, 1.5) for i in range(40)]
    wait_until(lambda: len((inspect.active() or {}).get("w@test", [])) == 40, 10)
    assert inspect.stats()["w@test"]["pool"]["in-flight"] == 40
    assert [r.get(timeout=10) for r in results] == list(range(40))

    def of(kind: str) -> list[dict[str, Any]]:
        return [e for e in celery_events if e["type"] == kind]

    wait_until(lambda: len(of("task-succeeded")) == 40, 10)
    assert len(of("task-started")) == len(of("task-received")) == 40
    assert all(1.4 < e["runtime"] < 60 for e in of("task-succeeded"))


def test_outcomes_are_celerys(
    start_pool: Starter, pool_app: Any, notes: Callable[..., list[str]]
) -> None:
    """Errors, error callbacks, retries, chains, chords and tasks without a coroutine."""
    start_pool()
    failed = pool_app.gen.apply_async((1, 0.01, "boom"), link_error=pool_app.on_error.s())
    with pytest.raises(ValueError, match="boom"):
        failed.get(timeout=10)
    assert "ValueError" in failed.traceback
    wait_until(lambda: notes("errback"), 10)

    assert pool_app.flaky.delay("f", 2).get(timeout=10) == 2
    assert notes("try f") == ["try f 0", "try f 1", "try f 2"]

    linked = chain(pool_app.gen.s(5), pool_app.plain.s(), pool_app.gen.s())
    assert linked.apply_async().get(timeout=10) == ["plain", 5]
    joined = chord([pool_app.gen.s(i) for i in range(8)], pool_app.plain.s())
    assert sorted(joined.apply_async().get(timeout=10)[1]) == list(range(8))

    with pytest.raises(TypeError):
        pool_app.gen.apply_async(kwargs={"unknown": 1}).get(timeout=10)


def test_a_revoked_task_stops(
    start_pool: Starter, pool_app: Any, notes: Callable[..., list[str]], unacked: Callable[[], int]
) -> None:
    start_pool(prefetch=1)
    running, waiting = pool_app.gen.delay("a", 60), pool_app.gen.delay("b", 60)
    wait_until(lambda: notes("start a"))
    waiting.revoke()
    running.revoke(terminate=True)
    for result in (running, waiting):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=10)
    wait_until(lambda: notes("cancelled a"))
    wait_until(lambda: unacked() == 0, what="both are acknowledged")
    assert not notes("start b")
    assert pool_app.gen.delay("c", 0.01).get(timeout=10) == "c", "the slot is free again"


def test_time_limits_end_a_task(start_pool: Starter, pool_app: Any) -> None:
    start_pool()
    with pytest.raises(SoftTimeLimitExceeded):
        pool_app.limited.delay().get(timeout=10)
    with pytest.raises(TimeLimitExceeded):
        pool_app.limited.delay(hang=True).get(timeout=10)


def test_a_first_signal_lets_short_tasks_end_and_returns_the_rest(
    start_pool: Starter,
    pool_app: Any,
    notes: Callable[..., list[str]],
    unacked: Callable[[], int],
    queued: Callable[[str], int],
) -> None:
    worker = start_pool(OMNIQ_DRAIN_SECONDS=2)
    short = [pool_app.gen.delay(f"short{i}", 1.5) for i in range(5)]
    long = [pool_app.gen.delay(f"long{i}", 3 if i == 0 else 60) for i in range(3)]
    wait_until(lambda: len(notes("start")) == 8)
    assert worker.stop() == 0, worker.output()
    assert [r.state for r in short] == ["SUCCESS"] * 5
    assert len(notes("cancelled long")) == 3
    assert (unacked(), queued(pool_app.QUEUE)) == (0, 3)
    start_pool("w2")
    assert long[0].get(timeout=20) == "long0"


def test_a_second_signal_ends_at_once_and_nothing_is_lost(
    start_pool: Starter, pool_app: Any, notes: Callable[..., list[str]]
) -> None:
    env = {"OMNIQ_VISIBILITY_TIMEOUT": 2}
    worker = start_pool(OMNIQ_DRAIN_SECONDS=30, **env)
    result = pool_app.gen.delay("x", 4)
    wait_until(lambda: notes("start x"))
    worker.popen.terminate()
    worker.wait_for("draining")
    time.sleep(0.6)  # later than one request's two signals
    assert worker.stop() == 128 + 15
    assert not notes("end x"), "it has not waited for the task"
    start_pool("w2", **env)
    assert result.get(timeout=20) == "x"


def test_a_killed_workers_tasks_are_delivered_again_within_seconds(
    start_pool: Starter, pool_app: Any, notes: Callable[..., list[str]]
) -> None:
    """The live worker's own task outlasts the visibility timeout and still runs once."""
    env = {"OMNIQ_VISIBILITY_TIMEOUT": 3}
    first = start_pool("w1", **env)
    killed = pool_app.gen.delay("killed", 1.5)
    wait_until(lambda: notes("start killed"))
    start_pool("w2", **env)
    first.kill()
    kept = pool_app.gen.delay("kept", 7)
    assert killed.get(timeout=20) == "killed"
    assert kept.get(timeout=20) == "kept"
    assert notes("start kept") == ["start kept"]


def test_a_worker_that_stood_still_settles_nothing_of_another(
    start_pool: Starter, pool_app: Any, notes: Callable[..., list[str]],
    unacked: Callable[[], int],
) -> None:  # fmt: skip
    """What it acknowledges is its own delivery: the task is not lost with its new holder."""
    env = {"OMNIQ_VISIBILITY_TIMEOUT": 2}
    stopped = start_pool("w1", **env)
    result = pool_app.gen.delay("x", 5)
    wait_until(lambda: notes("start x"))
    stopped.popen.send_signal(signal.SIGSTOP)
    other = start_pool("w2", **env)
    wait_until(lambda: len(notes("start x")) == 2, 20, "the other worker runs it")
    stopped.popen.send_signal(signal.SIGCONT)
    stopped.wait_for("succeeded", 20)
    time.sleep(0.3)  # it acknowledges; nothing tells when
    assert unacked() == 1
    assert len(notes("end x")) == 1, "the other one still runs it"
    other.kill()
    wait_until(lambda: unacked() == 0, 20, "it is delivered again, and known to be done")
    assert result.get(timeout=20) == "x"


def test_leases_run_by_the_servers_clock(
    start_pool: Starter, pool_app: Any, notes: Callable[..., list[str]], redis_client: Any
) -> None:
    """What was noted by a clock that was ahead is delivered again all the same."""
    env = {"OMNIQ_VISIBILITY_TIMEOUT": 2}
    lost = start_pool("w1", **env)
    result = pool_app.gen.delay("x", 0.5)
    wait_until(lambda: notes("start x"))
    lost.kill()
    (tag,) = redis_client.hkeys("omniq:unacked")
    redis_client.zadd("omniq:unacked_index", {tag: time.time() + 3600})
    start_pool("w2", **env)
    assert result.get(timeout=20) == "x"


def test_a_wedged_loop_loses_its_leases_and_then_its_process(
    start_pool: Starter, pool_app: Any, notes: Callable[..., list[str]]
) -> None:
    env = {"OMNIQ_VISIBILITY_TIMEOUT": 2, "OMNIQ_STALL_TIMEOUT": 2, "OMNIQ_HANG_TIMEOUT": 6}
    wedged = start_pool("w1", **env)
    result = pool_app.gen.delay("x", 3)
    wait_until(lambda: notes("start x"))
    pool_app.block.delay(60)
    wait_until(lambda: notes("blocking"))
    start_pool("w2", prefetch=1, **env)
    wedged.wait_for("the engine loop has not turned", 20)
    wait_until(lambda: len(notes("start x")) == 2, 20, "the other worker runs it")
    assert result.get(timeout=20) == "x"
    assert wedged.popen.wait(20) == 1
    assert "in block" in wedged.output(), "its log says where it hung"


def test_running_tasks_survive_a_broken_broker_connection(
    start_pool: Starter, pool_app: Any, redis_client: Any, notes: Callable[..., list[str]],
    unacked: Callable[[], int],
) -> None:  # fmt: skip
    worker = start_pool(OMNIQ_VISIBILITY_TIMEOUT=4)
    results = [pool_app.gen.delay(i, 5) for i in range(6)]
    wait_until(lambda: len(notes("start")) == 6)
    redis_client.client_kill_filter(_type="normal", skipme=True)
    redis_client.client_kill_filter(_type="pubsub", skipme=True)
    assert [r.get(timeout=30) for r in results] == list(range(6))
    assert len(notes("start")) == 6, "each ran once"
    assert "adopted" in worker.output()
    wait_until(lambda: unacked() == 0)


def test_higher_priorities_go_first(
    start_pool: Starter, pool_app: Any, notes: Callable[..., list[str]]
) -> None:
    for priority in (9, 9, 4, 9, 1, 0, 4):
        pool_app.gen.apply_async((f"p{priority}", 0.01), priority=priority)
    start_pool(prefetch=1)
    wait_until(lambda: len(notes("end")) == 7)
    assert [t.split("p")[-1] for t in notes("end")] == ["0", "1", "4", "4", "9", "9", "9"]


def test_two_namespaces_on_one_broker_do_not_meet(
    start_pool: Starter, pool_app: Any, redis_client: Any
) -> None:
    start_pool("mine")
    start_pool("theirs", OMNIQ_NAMESPACE="other")
    replies = pool_app.app.control.inspect(timeout=1).ping()
    assert list(replies) == ["mine@test"]
    keys = {k.decode() for k in redis_client.keys("*")}
    foreign = {k for k in keys if not k.startswith(("omniq", "other", "_kombu", "pool.test"))}
    assert not foreign


@pytest.mark.parametrize("number", [2, 15])
def test_an_idle_worker_stops_at_once(start_pool: Starter, number: int) -> None:
    worker = start_pool(OMNIQ_DRAIN_SECONDS=600)
    assert worker.stop(number) == 0
