"""From one stage's queue to the next: the worker's transport, and stock Celery on both sides."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery import chain as celery_chain
from kombu import Queue
from omniq_workers.notes import Notes
from omniq_workers.transport import Channel, StageConnection
from redis.exceptions import ConnectionError
from support import wait_until

from omniq import chain, keys
from omniq.celery import app, celery_priority, queue_keys
from omniq.config import get_pipeline
from omniq.jobs.model import JobRecord, JobSpec, JobState, StageState, new_job_id
from omniq.jobs.store import JobStore
from omniq.submit import submit

HERE = Path(__file__).parent
NoteReader = Callable[..., list[str]]


async def start_job(store: JobStore, prompt: str = "x", **more: Any) -> JobRecord:
    return await submit(store, pipeline="p", inputs={"prompt": prompt}, **more)


async def recorded(store: JobStore, prompt: str = "x") -> JobSpec:
    """A job of the pipeline ``p`` that nobody has sent a message for."""
    pipeline = get_pipeline("p")
    spec = JobSpec(
        id=new_job_id(time.time()),
        pipeline="p",
        inputs={"prompt": prompt},
        parameters={},
        stages=pipeline.topological_order(),
        created=time.time(),
    )
    await store.create(spec, {s: pipeline.upstream(s) for s in spec.stages})
    return spec


async def ended(store: JobStore, job_id: str, timeout: float = 30) -> JobRecord:
    record = await store.wait(job_id, timeout)
    assert record.state.final, record
    return record


async def noted(notes: NoteReader, prefix: str, count: int = 1) -> None:
    await asyncio.to_thread(wait_until, lambda: len(notes(prefix)) >= count, 20, prefix)


# -- stock Celery ----------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", [("a>b", "b>c"), ("a>b", "a>c", "b>d", "c>d")])
async def test_a_stock_worker_takes_our_messages(
    stages: Any, store: JobStore, spawn: Any, notes: NoteReader, edges: tuple[str, ...]
) -> None:
    """And carries the whole job through by Celery's own continuation."""
    stages.define(*edges)
    names = get_pipeline("p").topological_order()
    queues = ",".join(keys.stage_queue("p", s) for s in names)
    worker = spawn(
        "stock",
        [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "stock_app",
            "worker",
            "-P",
            "solo",
            "-Q",
            queues,
            "-l",
            "INFO",
        ],
    )
    worker.wait_for("ready.")
    job = await start_job(store, priority=8)
    await noted(notes, names[-1])
    ran = {n.split()[0]: n for n in notes()}
    assert next(iter(ran)) == "a" and ran.keys() == set(names)
    assert ran["a"] == f"a {job.id} None 1"
    assert ran["b"] == f"b {job.id} did a 1", "the parent's result and priority travel on"


@pytest.mark.parametrize("edges", [("a>b", "b>c"), ("a>b", "a>c", "b>d", "c>d")])
async def test_a_stock_clients_chain_runs_on_our_workers(
    stages: Any, store: JobStore, notes: NoteReader, unacked: Any, edges: tuple[str, ...]
) -> None:
    stages.define(*edges)
    pipeline = get_pipeline("p")
    stages.start(*pipeline.topological_order())
    spec = await recorded(store)
    await asyncio.to_thread(chain.build(spec, pipeline).apply_async)
    assert (await ended(store, spec.id)).state is JobState.SUCCEEDED
    assert sorted(notes("run")) == [f"run {s} {spec.id}" for s in sorted(spec.stages)]
    wait_until(lambda: unacked() == 0)


async def test_a_plain_celery_client_submits_and_sends_stages(
    stages: Any, store: JobStore, broker: Any, notes: NoteReader, unacked: Any
) -> None:
    """One that knows nothing of omniq but names of tasks and queues."""
    plain = Celery("plain", broker=broker.url, backend=broker.url, set_as_current=False)
    plain.conf.result_backend_transport_options = {"global_keyprefix": "omniq:"}
    stages.define("a>b")
    stages.start("a", "b")
    sent = plain.send_task(
        "omniq.submit", ["p"], {"prompt": "x", "priority": 7}, queue="omniq.control"
    )
    answer = await asyncio.to_thread(sent.get, timeout=30)
    assert (await ended(store, answer["id"])).state is JobState.SUCCEEDED
    spec = await recorded(store)
    for stage in ("a", "b"):
        plain.send_task(
            "omniq.stage", kwargs={"job": spec.id, "stage": stage}, queue=f"omniq.p.{stage}"
        )
        await noted(notes, f"done {stage} {spec.id}")
    assert (await ended(store, spec.id)).state is JobState.SUCCEEDED
    wait_until(lambda: unacked() == 0)
    plain.close()


async def test_a_foreign_task_behind_a_stage_is_sent_by_celery(
    stages: Any, store: JobStore, redis_client: redis.Redis
) -> None:
    stages.define("a>b")
    stages.start("a", "b")
    spec = await recorded(store)
    linear = chain.build(spec, get_pipeline("p"))
    foreign = app.signature("notify.me", queue="other")
    celery_chain(*linear.tasks, foreign, app=app).apply_async()
    assert (await ended(store, spec.id)).state is JobState.SUCCEEDED
    wait_until(lambda: redis_client.llen(queue_keys("other")[4]) == 1, 10, "the foreign message")
    message = json.loads(redis_client.lpop(queue_keys("other")[4]))
    assert message["headers"]["task"] == "notify.me"
    assert message["headers"]["parent_id"] == f"{spec.id}.b"


# -- the cost --------------------------------------------------------------------------------------


async def test_a_hop_takes_one_script_and_no_transaction(
    stages: Any, store: JobStore, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server is asked to do for a job of two stages; a new command here costs all jobs."""
    stages.define("a>b")
    monkeypatch.setenv("OMNIQ_HEARTBEAT", "60")
    stages.start("a", "b")
    await ended(store, (await start_job(store)).id)
    redis_client.config_resetstat()
    jobs = 20
    for _ in range(jobs):
        await ended(store, (await start_job(store)).id)
    stats = redis_client.info("commandstats")
    calls = {k.removeprefix("cmdstat_"): v["calls"] for k, v in stats.items()}
    looks = calls.get("lmpop", 0)
    # kombu looks for what the dead have left now and then; giving up its lock is a script, too.
    extra = calls["evalsha"] - (jobs * 4 + looks)
    assert 0 <= extra <= calls.get("zrange", 0), "create and wait; for each stage finish"
    assert looks < 60, "one a second"
    assert "lpush" not in calls, "messages are handed to those who wait for them"
    assert calls.get("multi", 0) < jobs, "kombu's transactions around every message"
    assert "xread" not in calls, "who waits is told of the end only"


# -- celery hears of a task a moment later ---------------------------------------------------------


async def test_a_task_that_started_ahead_is_inspected_and_revoked_as_any(
    stages: Any,
    store: JobStore,
    notes: NoteReader,
    unacked: Any,
    celery_events: list[dict[str, Any]],
) -> None:
    stages.define("a>b")
    stages.start("a")
    job = await start_job(store, "a:sleep=30")
    await noted(notes, f"run a {job.id}")

    def active() -> list[str]:
        found = app.control.inspect(timeout=2).active() or {}
        return [task["id"] for tasks in found.values() for task in tasks]

    await asyncio.to_thread(wait_until, lambda: active() == [f"{job.id}.a"], 20)
    app.control.revoke(f"{job.id}.a", terminate=True)
    await noted(notes, f"stopped a {job.id}")
    assert (await ended(store, job.id, 10)).state is JobState.CANCELLED
    wait_until(lambda: unacked() == 0)
    kinds = [e["type"] for e in celery_events if e.get("uuid") == f"{job.id}.a"]
    assert kinds == ["task-sent", "task-received", "task-started", "task-revoked"]


async def test_a_task_revoked_before_it_comes_does_not_run(
    stages: Any, store: JobStore, notes: NoteReader, unacked: Any, queued: Any
) -> None:
    """Its job is cancelled, which a worker that starts later knows too; other jobs are not."""
    stages.define("a>b", window=1)
    stages.start("a")
    busy = await start_job(store, "a:sleep=2")
    await noted(notes, f"run a {busy.id}")
    waiting = await start_job(store)
    app.control.revoke(f"{waiting.id}.a")
    await noted(notes, f"done a {busy.id}")
    wait_until(lambda: (unacked(), queued("omniq.p.a")) == (0, 0))
    assert notes(f"run a {waiting.id}") == []
    assert (await store.get(waiting.id)).state is JobState.CANCELLED
    assert (await store.get(busy.id)).stages["a"].state is StageState.SUCCEEDED
    app.control.revoke(f"{busy.id}.a")  # late
    await asyncio.to_thread(app.control.inspect(timeout=2).revoked)  # it has been heard
    assert (await store.get(busy.id)).state is JobState.RUNNING
    stages.start("b")
    assert (await ended(store, busy.id)).state is JobState.SUCCEEDED


# -- messages handed to workers --------------------------------------------------------------------


async def test_a_worker_is_handed_no_more_than_it_has_room_for(
    stages: Any, store: JobStore, redis_client: redis.Redis, notes: NoteReader, unacked: Any
) -> None:
    """The rest waits in the queue, in order; afterwards all of the room is known again."""
    stages.define("a>b", window=2)
    stages.start("a", "b")
    waiting = keys.waiting("omniq.p.a")

    def room() -> list[float]:
        return [score for _, score in redis_client.zrange(waiting, 0, -1, withscores=True)]

    wait_until(lambda: room() == [2])
    jobs = [await start_job(store, "a:sleep=0.3") for _ in range(2)]
    assert room() == [0]
    jobs += [await start_job(store, "a:sleep=0.3") for _ in range(4)]
    assert redis_client.llen(chain_list("a")) + unacked() == 6, "four are not handed"
    for job in jobs:
        assert (await ended(store, job.id)).state is JobState.SUCCEEDED
    steps = [n for n in notes() if n.split()[:2] in (["run", "a"], ["done", "a"])]
    running = 0
    for step in steps:
        running += 1 if step.startswith("run") else -1
        assert 0 <= running <= 2, steps
    assert [n.split()[2] for n in steps if n.startswith("run")] == [j.id for j in jobs]
    wait_until(lambda: room() == [2] and unacked() == 0)


async def test_a_task_revoked_before_it_is_handed_does_not_run(
    stages: Any, store: JobStore, notes: NoteReader, unacked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run, which has begun with the message's arrival, is given back, and the job cancelled."""
    stages.define("a>b")
    stages.start("a")
    job_id = new_job_id(time.time())

    def revoked() -> bool:  # the worker may not have listened yet
        app.control.revoke(f"{job_id}.a")
        found = app.control.inspect(timeout=2).revoked() or {}
        return any(f"{job_id}.a" in str(ids) for ids in found.values())

    await asyncio.to_thread(wait_until, revoked, 20)
    monkeypatch.setattr("omniq.job_request.new_job_id", lambda now: job_id)
    job = await start_job(store)
    wait_until(lambda: unacked() == 0)
    assert job.id == job_id and notes(f"run a {job_id}") == []
    record = await ended(store, job.id)
    assert (record.state, record.stages["a"].attempts) == (JobState.CANCELLED, 0)


async def test_a_worker_that_stands_still_is_passed_over(
    stages: Any, store: JobStore, redis_client: redis.Redis
) -> None:
    """Also: the place of one that was killed is dropped by whoever meets it."""
    stages.define("a>b")
    stages.start("a", "b")
    waiting = keys.waiting("omniq.p.a")
    wait_until(lambda: redis_client.zcard(waiting) == 1)
    ((member, _),) = redis_client.zrange(waiting, 0, -1, withscores=True)
    stages.workers["a"].popen.send_signal(signal.SIGSTOP)
    wait_until(lambda: not redis_client.exists(keys.hears(member.decode())))
    job = await start_job(store)
    assert redis_client.llen(chain_list("a")) == 1, "whoever serves the queue next has it"
    stages.workers["a"].kill()
    other = await start_job(store)
    assert redis_client.zcard(waiting) == 0
    # Nobody looks at the place of one that had no room when it was killed, but its successor.
    redis_client.zadd(waiting, {"p.a.1@killed|0": 0})
    stages.start("a")
    for record in (job, other):
        assert (await ended(store, record.id)).state is JobState.SUCCEEDED
    (place,) = redis_client.zrange(waiting, 0, -1)
    assert redis_client.exists(keys.hears(place.decode()))


async def test_a_worker_whose_connection_breaks_waits_by_a_new_name(
    stages: Any, store: JobStore, redis_client: redis.Redis, unacked: Any
) -> None:
    stages.define("a>b")
    stages.start("a", "b")
    waiting = keys.waiting("omniq.p.a")
    for _ in range(3):
        wait_until(lambda: redis_client.zrange(waiting, 0, -1) != [])
        (name,) = redis_client.zrange(waiting, 0, -1)
        for client in redis_client.client_list():
            if int(client["sub"]) and int(client.get("resp", 0)) == 3:
                redis_client.client_kill_filter(_id=client["id"])
        job = await start_job(store)
        assert (await ended(store, job.id)).state is JobState.SUCCEEDED
        wait_until(lambda name=name: name not in redis_client.zrange(waiting, 0, -1))
    wait_until(lambda: unacked() == 0)


def chain_list(stage: str) -> str:
    """The list of a stage's messages of the usual priority."""
    return queue_keys(keys.stage_queue("p", stage))[celery_priority(5)]


# -- the transport ---------------------------------------------------------------------------------


@pytest.fixture
def channel(broker: Any) -> Any:
    app.follow_settings()
    options = {**app.conf.broker_transport_options, "visibility_timeout": 60}
    with StageConnection(broker.url, transport_options=options) as connection:
        yield connection.default_channel


def test_a_message_is_noted_held_and_done_with(channel: Channel, redis_client: redis.Redis) -> None:
    """Also: what kombu's own channel would restore is what was sent."""
    client = channel.connection.client
    for number in range(3):
        client.Producer().publish({"n": number}, routing_key="q", declare=[])
    got: list[Any] = []
    with client.Consumer(
        [Queue("q")], callbacks=[lambda body, message: got.append((body, message))]
    ) as consumer:
        taken = consumer.channel
        while len(got) < 3:
            client.drain_events(timeout=5)
    assert [body["n"] for body, _ in got] == [0, 1, 2]
    taken.settle()
    assert redis_client.hlen("omniq:unacked") == redis_client.zcard("omniq:unacked_index") == 3
    tag = got[0][1].delivery_tag
    raw, exchange, routing_key = json.loads(redis_client.hget("omniq:unacked", tag))
    assert raw["properties"]["delivery_tag"] == tag and (exchange, routing_key) == ("", "q")
    got[0][1].ack()
    taken.settle()
    assert not redis_client.hexists("omniq:unacked", tag)
    assert redis_client.zscore("omniq:unacked_index", tag) is None


def test_messages_held_when_the_connection_breaks_are_noted_again(
    channel: Channel, redis_client: redis.Redis
) -> None:
    channel.connection.client.Producer().publish({}, routing_key="q", declare=[])
    queue = channel.connection.client.SimpleQueue("q")
    held = queue.get(timeout=5)
    taken = queue.consumer.channel
    taken.renew([held.delivery_tag])
    taken.settle()
    redis_client.delete("omniq:unacked", "omniq:unacked_index")
    redis_client.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(ConnectionError):
        taken.settle()
        taken.renew([held.delivery_tag])
        taken.settle()
    taken.recover()
    assert redis_client.hexists("omniq:unacked", held.delivery_tag)
    assert redis_client.zscore("omniq:unacked_index", held.delivery_tag) is not None


def test_a_refused_note_is_reported(
    broker: Any, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    notes = Notes(redis.ConnectionPool(port=broker.port))
    redis_client.set("text", "x")
    notes.add("HSET", "text", "field", 1)
    notes.add("SET", "after", "y")
    with caplog.at_level(logging.ERROR):
        notes.settle()
    assert "WRONGTYPE" in caplog.text
    assert redis_client.get("after") == b"y"
    notes.close()


# -- messages that are none ------------------------------------------------------------------------


def faulty(message: dict[str, Any], **changes: Any) -> bytes:
    changed = {**message, **changes}
    return json.dumps({k: v for k, v in changed.items() if v is not None}).encode()


async def test_what_is_no_message_is_set_aside_and_stops_nobody(
    stages: Any, store: JobStore, redis_client: redis.Redis, unacked: Any, queued: Any
) -> None:
    stages.define("a>b")
    stages.start("a", "b")
    pipeline = get_pipeline("p")
    spec = await recorded(store)
    (post,) = chain.first_posts(spec, pipeline)
    good = json.loads(post.message)
    properties = good["properties"]
    bad = [
        b"\xff\x00\x80 random",
        b"",
        b"[]",
        b"17",
        b'{"properties": []}',
        b'{"a":' * 2000,
        faulty(good, properties=None),
        faulty(good, properties={**properties, "delivery_tag": None}),
        faulty(good, properties={**properties, "delivery_tag": "t1", "delivery_info": {}}),
        faulty(good, properties={**properties, "delivery_tag": "t2"}, headers={}),
        faulty(good, properties={**properties, "delivery_tag": "t3"}, headers=[]),
        faulty(good, properties={**properties, "delivery_tag": "t4"}, headers={"task": {}}),
        faulty(good, properties={**properties, "delivery_tag": "t5"}, headers=None),
        faulty(good, properties={**properties, "delivery_tag": "t6"}, body="%%%"),
        faulty(good, properties={**properties, "delivery_tag": "t7", "body_encoding": "x"}),
        faulty(good, properties={**properties, "delivery_tag": "t8"}, **{"content-type": "x/y"}),
    ]
    for item in bad:
        redis_client.lpush(post.queue, item)
    redis_client.lpush(post.queue, post.message)
    assert (await ended(store, spec.id)).state is JobState.SUCCEEDED
    wait_until(lambda: unacked() == 0 and queued("omniq.p.a") == 0)
    wait_until(lambda: redis_client.llen("omniq:undecodable") == len(bad))
    assert stages.workers["a"].popen.poll() is None
    assert bad[0] in redis_client.lrange("omniq:undecodable", 0, -1)
    assert "omniq:undecodable" in stages.workers["a"].output()


# -- a killed worker -------------------------------------------------------------------------------


async def test_a_message_is_noted_before_a_worker_has_seen_it(
    channel: Channel, redis_client: redis.Redis
) -> None:
    """A worker that stands still, or dies, with messages on their way to it loses none."""
    client = channel.connection.client
    with client.Consumer([Queue("q")], callbacks=[lambda body, message: None]) as consumer:
        with pytest.raises(TimeoutError):
            client.drain_events(timeout=0.2)  # finds nothing, and is told of what comes
        other = StageConnection(client.as_uri())
        for number in range(3):
            other.Producer().publish({"n": number}, routing_key="q", declare=[])
        taken = consumer.channel
        taken.look_again()
        taken._brpop_start()  # asks, and never reads the answer
        wait_until(lambda: redis_client.hlen("omniq:unacked") > 0)
        held = redis_client.hlen("omniq:unacked")
        assert held + redis_client.llen("q") == 3
        assert redis_client.zcard("omniq:unacked_index") == held
        other.release()


def test_a_channel_that_consumes_no_more_takes_nothing_when_it_is_told_of_a_message(
    channel: Channel, redis_client: redis.Redis
) -> None:
    client = channel.connection.client
    got: list[Any] = []
    queues = [Queue("q")]
    with client.Consumer(queues, callbacks=[lambda body, message: got.append(body)]) as consumer:
        with pytest.raises(TimeoutError):
            client.drain_events(timeout=0.2)
        consumer.cancel()
        with StageConnection(client.as_uri()) as other:
            other.Producer().publish({}, routing_key="q", declare=[])
        with pytest.raises(TimeoutError):
            client.drain_events(timeout=0.5)
        assert (got, redis_client.llen("q")) == ([], 1)
        consumer.consume()
        client.drain_events(timeout=5)
    assert got == [{}]


async def test_a_user_who_may_not_be_told_of_changes_takes_messages_as_kombu_does(
    stages: Any, store: JobStore, redis_client: redis.Redis, broker: Any, unacked: Any
) -> None:
    stages.define("a>b")
    rules = ["on", ">x", "~*", "&*", "+@all", "-client|tracking"]
    redis_client.execute_command("ACL", "SETUSER", "untold", *rules)
    url = broker.url.replace("://", "://untold:x@")
    stages.start("a", "b", OMNIQ_BROKER_URL=url)
    redis_client.lpush(keys.stage_queue("p", "a"), b"no message")
    jobs = [await start_job(store) for _ in range(10)]
    for job in jobs:
        assert (await ended(store, job.id)).state is JobState.SUCCEEDED
    wait_until(lambda: unacked() == 0 and redis_client.llen("omniq:undecodable") == 1)
    assert "the broker refused CLIENT" in stages.workers["a"].output()
    redis_client.execute_command("ACL", "DELUSER", "untold")
