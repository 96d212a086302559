"""Records of another version of omniq: nobody stumbles over them, and they can be tried again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from omniq import keys
from omniq.errors import JobUnreadable
from omniq.jobs.dead import DeadLetters
from omniq.jobs.model import JobSpec
from omniq.jobs.store import JobStore
from omniq.submit import submit


def test_a_record_names_only_what_is_not_at_its_default() -> None:
    """So that an older version reads it if it asks for nothing new."""
    spec = JobSpec(id="a", pipeline="p", inputs={}, parameters={}, stages=["s"], created=1.0)
    assert set(json.loads(spec.to_json())) == {
        "id", "pipeline", "inputs", "parameters", "stages", "created"
    }  # fmt: skip
    assert JobSpec.from_json(spec.to_json()) == spec
    other = spec.model_copy(update={"priority": 9, "tenant": "t", "stream": False})
    assert JobSpec.from_json(other.to_json()) == other
    with pytest.raises(JobUnreadable, match="pipeline: Field required"):
        JobSpec.from_json(b'{"id": "a"}')


async def test_a_record_that_asks_for_more_fails_and_harms_no_other(
    own_valkey: Any, own_broker_stages: Any, notes: Any
) -> None:
    stages = own_broker_stages
    stages.define("a>b")
    client = redis.Redis(port=own_valkey.port)
    store = JobStore.from_settings()
    odd, lost, good = [await submit(store, pipeline="p", inputs={"prompt": "x"}) for _ in range(3)]
    kept = {}
    for job in (odd, lost):
        kept[job.id] = client.hget(keys.job(job.id), "spec")
        spec = {**json.loads(kept[job.id]), "future": {"more": 1}}
        client.hset(keys.job(job.id), "spec", json.dumps(spec))
    # Of one the message is lost as well: the reconciler meets it.
    queue = keys.stage_queue("p", "a")
    names = list(client.scan_iter(f"{queue}*"))
    held = [(n, i) for n in names for i in client.lrange(n, 0, -1) if lost.id.encode() in i]
    assert [client.lrem(name, 1, item) for name, item in held] == [1]
    stages.start("a", "b", OMNIQ_RECONCILE_INTERVAL=1)
    assert (await store.wait(good.id, 30)).state == "succeeded"
    with pytest.raises(JobUnreadable, match="future: Extra inputs are not permitted"):
        await store.wait(odd.id, 30)
    assert client.hget(keys.job(odd.id), "state") == b"failed"
    assert json.loads(client.hget(keys.job(odd.id), "error"))["code"] == "job_unreadable"
    assert [r.id for r in (await store.list())[0]] == [good.id]

    letters = DeadLetters(store)
    (letter,) = await letters.list()
    assert (letter.id, letter.reason, letter.stage) == (odd.id, "job_unreadable", "a")
    with pytest.raises(JobUnreadable):
        await letters.retry(odd.id)

    # A process of their version, here: their records as this one writes them.
    for job_id, spec in kept.items():
        client.hset(keys.job(job_id), "spec", spec)
    await letters.retry(odd.id)
    for job in (odd, lost):
        assert (await store.wait(job.id, 30)).state == "succeeded", job.id
    assert len(notes(f"run a {odd.id}")) == 1
    await store.close()
