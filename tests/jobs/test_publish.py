"""Hand-made messages against Celery's own, and the scripts that send them."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import kombu.pools
import pytest
import redis.asyncio
from celery import signature
from support import graph

from omniq import chain, keys
from omniq.blobs.base import BlobRef
from omniq.celery import app, queue_keys
from omniq.config import PipelineConfig, get_pipeline
from omniq.errors import InvalidRequest
from omniq.jobs.model import JobSpec, JobState, StageResult, new_job_id
from omniq.jobs.store import JobStore
from omniq.publish import Parent, Post, continuation, event_channel
from omniq.submit import submit

#: What differs from message to message, or says who sent it.
OWN = {"delivery_tag", "origin", "reply_to"}
#: Celery repeats these options among the properties, and numbers tasks that start side by side.
UNREAD = {"argsrepr", "kwargsrepr", "group", "group_index"}


@pytest.fixture(autouse=True)
def no_connection_left() -> Iterator[None]:
    """Other tests count connections."""
    yield
    kombu.pools.reset()


PIPELINES = {
    "linear": lambda: get_pipeline("tiny-omni"),
    "diamond": lambda: graph("a>b", "a>c", "b>d", "c>d", "d>e"),
    "two roots": lambda: graph("a>c", "b>c"),
}


def spec_of(pipeline: PipelineConfig, job_id: str = "j1", **more: Any) -> JobSpec:
    return JobSpec(
        id=job_id,
        pipeline=pipeline.name,
        inputs={"prompt": "a ręd 'circle' above a blue square, " * 20},
        parameters={},
        stages=pipeline.topological_order(),
        created=1.0,
        **more,
    )


def decoded(raw: bytes, *, without: set[str]) -> dict[str, Any]:
    """A message as kombu and Celery read it."""
    message: dict[str, Any] = json.loads(raw)
    assert message["properties"]["body_encoding"] == "base64"
    message["body"] = json.loads(base64.b64decode(message["body"]))
    return _without(message, without)


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {k: _without(v, names) for k, v in value.items() if k not in names}
    return [_without(v, names) for v in value] if isinstance(value, list) else value


def queued(client: Any, pipeline: PipelineConfig) -> dict[str, list[bytes]]:
    """All messages by the list that holds them; they are taken out."""
    found = {}
    for stage in pipeline.topological_order():
        for key in queue_keys(keys.stage_queue(pipeline.name, stage)):
            if messages := client.lrange(key, 0, -1):
                found[key] = messages
                client.delete(key)
    return found


def same(ours: dict[str, list[bytes]], celerys: dict[str, list[bytes]]) -> None:
    assert ours.keys() == celerys.keys()
    for key, messages in ours.items():
        assert len(messages) == len(celerys[key])
        for mine, theirs in zip(messages, celerys[key], strict=True):
            own = json.loads(mine)
            assert own["headers"]["argsrepr"] == "()"
            assert len(own["properties"]["delivery_tag"]) == 36
            assert decoded(mine, without=OWN | UNREAD) == decoded(theirs, without=OWN | UNREAD)


def by_list(posts: list[Post]) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for post in posts:
        found.setdefault(post.queue, []).append(post.message)
    return found


@pytest.mark.parametrize("priority", [0, 5, 9])
@pytest.mark.parametrize("kind", PIPELINES)
def test_first_messages_say_what_celerys_own_say(
    redis_client: Any, kind: str, priority: int
) -> None:
    pipeline = PIPELINES[kind]()
    spec = spec_of(pipeline, priority=priority)
    chain.build(spec, pipeline).apply_async(retry=False)
    same(by_list(chain.first_posts(spec, pipeline)), queued(redis_client, pipeline))


@pytest.mark.parametrize("kind", PIPELINES)
def test_continuations_say_what_celerys_own_say(redis_client: Any, kind: str) -> None:
    """From every stage to the last: what a worker sends is what Celery's tracer would send."""
    pipeline = PIPELINES[kind]()
    waiting = chain.first_posts(spec_of(pipeline, priority=7), pipeline)
    assert waiting
    seen = set()
    while waiting:
        message = json.loads(waiting.pop().message)
        headers, embed = message["headers"], json.loads(base64.b64decode(message["body"]))[2]
        seen.add(headers["id"])
        parent = Parent(headers["id"], headers["root_id"], message["properties"]["priority"])
        following = continuation(embed, "j1", result="x: y", parent=parent)
        assert (following.callbacks, following.chain) == ([], [])
        options = {"parent_id": parent.id, "root_id": parent.root, "priority": parent.priority}
        for callback in embed["callbacks"] or ():
            signature(callback, app=app).apply_async(("x: y",), **options)
        if embed["chain"]:
            *rest, following_one = embed["chain"]
            signature(following_one, app=app).apply_async(("x: y",), chain=rest, **options)
        same(by_list(following.posts), queued(redis_client, pipeline))
        waiting += following.posts
    assert {i.split(".")[1] for i in seen} == set(pipeline.topological_order())


def test_what_is_no_stage_of_the_job_is_left_to_celery() -> None:
    pipeline = get_pipeline("tiny-omni")
    stage = chain.build(spec_of(pipeline), pipeline).tasks[0]
    other_job = chain.build(spec_of(pipeline, "j2"), pipeline).tasks[0]
    foreign = app.signature("notify", args=(1,))
    immutable, grouped = stage.clone().set(immutable=True), stage.clone(countdown=3)
    parent = Parent("j1.x", "j1.x", 4)
    left = [other_job, foreign, immutable, grouped]
    following = continuation(
        {"callbacks": [*left, stage], "chain": [stage, foreign]}, "j1", result="", parent=parent
    )
    assert [p.stage for p in following.posts] == ["ar"]
    assert following.callbacks == left
    assert following.chain == [stage, foreign], "Celery sends what comes next, and it the rest"


def test_the_sent_event_is_celerys(redis_client: Any) -> None:
    pipeline = get_pipeline("tiny-omni")
    spec = spec_of(pipeline)
    pubsub = redis_client.pubsub()
    pubsub.psubscribe("*")
    assert pubsub.get_message(timeout=5)["type"] == "psubscribe"
    chain.build(spec, pipeline).apply_async(retry=False)
    theirs = pubsub.get_message(timeout=5)
    (post,) = chain.first_posts(spec, pipeline)
    assert theirs["channel"].decode() == event_channel()
    varying = {"timestamp", "clock", "delivery_tag"}
    assert decoded(post.event, without=varying) == decoded(theirs["data"], without=varying)


# -- sent by the scripts ---------------------------------------------------------------------------


@pytest.fixture
async def store(broker: object) -> Any:
    store = JobStore.from_settings()
    yield store
    await store.close()


async def create(store: JobStore, pipeline: PipelineConfig) -> JobSpec:
    spec = spec_of(pipeline, new_job_id(time.time()))
    upstream = {s: pipeline.upstream(s) for s in spec.stages}
    await store.create(spec, upstream, chain.first_posts(spec, pipeline))
    return spec


async def begin(store: JobStore, spec: JobSpec, stage: str) -> int:
    grant = await store.begin_stage(spec.id, stage, "w", redelivered=False)
    assert grant.verdict == "run"
    return grant.fence


async def test_a_job_is_recorded_and_queued_at_once(store: JobStore, redis_client: Any) -> None:
    """One script; one that is refused sends nothing."""
    redis_client.script_flush()
    redis_client.config_resetstat()
    record = await submit(store, pipeline="tiny-omni", inputs={"prompt": "x"})
    calls = {k: v["calls"] for k, v in redis_client.info("commandstats").items()}
    assert sum(calls.get(f"cmdstat_{c}", 0) for c in ("evalsha", "eval")) == 2, (
        "the first: no script"
    )
    pipeline = get_pipeline("tiny-omni")
    assert [len(m) for m in queued(redis_client, pipeline).values()] == [1]
    with pytest.raises(InvalidRequest):
        await store.create(record.spec, {}, chain.first_posts(record.spec, pipeline))
    assert queued(redis_client, pipeline) == {}


async def test_a_finished_stage_sends_the_next_in_the_same_script(
    store: JobStore, redis_client: Any
) -> None:
    pipeline = graph("a>b", "b>c")
    spec = await create(store, pipeline)
    ((first,),) = queued(redis_client, pipeline).values()
    embed = json.loads(base64.b64decode(json.loads(first)["body"]))[2]
    posts = continuation(embed, spec.id, result="", parent=Parent("p", "p", 4)).posts
    fence = await begin(store, spec, "a")
    assert not await store.finish_stage(spec.id, "a", fence + 1, StageResult(), posts)
    assert queued(redis_client, pipeline) == {}, "a run that is refused sends nothing"
    assert await store.finish_stage(spec.id, "a", fence, StageResult(), posts)
    assert list(queued(redis_client, pipeline)) == [posts[0].queue]


async def test_a_join_is_sent_once_with_its_last_input(store: JobStore, redis_client: Any) -> None:
    pipeline = graph("a>b", "a>c", "b>d", "c>d")
    spec = await create(store, pipeline)
    sent = []

    async def run(stage: str) -> None:
        for messages in queued(redis_client, pipeline).values():
            for raw in messages:
                body = json.loads(base64.b64decode(json.loads(raw)["body"]))
                sent.append(body[1]["stage"])
                embeds[body[1]["stage"]] = body[2]
        posts = continuation(embeds[stage], spec.id, result="", parent=Parent("p", "p", 4)).posts
        fence = await begin(store, spec, stage)
        assert await store.finish_stage(spec.id, stage, fence, StageResult(), posts)

    embeds: dict[str, Any] = {}
    for stage in ("a", "b", "c", "d"):
        await run(stage)
    assert sorted(sent) == ["a", "b", "c", "d"]
    assert (await store.get(spec.id)).state is JobState.SUCCEEDED


async def test_a_blob_is_freed_when_all_its_readers_are_done(
    store: JobStore, aredis: redis.asyncio.Redis
) -> None:
    """Not at the job's end only. What lies on the caller's host it may free itself, and says so."""
    pipeline = graph("a>b", "a>c", "b>d", "c>d")
    spec = await create(store, pipeline)
    refs = [
        BlobRef(id=f"{spec.id}.a.1.text", store="shm", host="h1", nbytes=1),
        BlobRef(id=f"{spec.id}.a.1.far", store="shm", host="h2", nbytes=1),
        BlobRef(id=f"{spec.id}.a.1.red", store="redis", nbytes=1),
    ]
    await aredis.set(keys.blob(refs[2].id), b"x")

    async def finish(stage: str, **more: Any) -> list[str]:
        fence = await begin(store, spec, stage)
        blobs = refs if stage == "a" else []
        result = StageResult(blobs=blobs)
        done = await store.finish_stage(spec.id, stage, fence, result, host="h1", **more)
        assert done
        return done.garbage

    assert await finish("a") == []
    assert await finish("b") == [], "c has still to read it"
    assert await aredis.exists(keys.blob(refs[2].id))
    (mine,) = await finish("c")
    assert BlobRef.model_validate_json(mine) == refs[0]
    assert not await aredis.exists(keys.blob(refs[2].id))
    assert await aredis.smembers(keys.host_garbage("h1")) == {mine.encode()}
    assert len(await aredis.smembers(keys.host_garbage("h2"))) == 1
    assert await finish("d", freed=[mine]) == []
    assert not await aredis.exists(keys.host_garbage("h1"))
