"""Jobs as Celery messages, without workers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
from kombu.exceptions import OperationalError
from support import graph

from omniq import chain, keys
from omniq.celery import app, queue_keys
from omniq.config import PipelineConfig, get_pipeline
from omniq.jobs.model import JobSpec
from omniq.settings import get_settings


def spec_of(pipeline: PipelineConfig, **more: Any) -> JobSpec:
    return JobSpec(
        id="j1",
        pipeline=pipeline.name,
        inputs={"prompt": "a red circle above a blue square, " * 20},
        parameters={},
        stages=pipeline.topological_order(),
        created=1.0,
        **more,
    )


def messages(redis_client: Any, pipeline: str, stage: str) -> list[dict[str, Any]]:
    found = []
    for key in queue_keys(keys.stage_queue(pipeline, stage)):
        found += [json.loads(m) for m in redis_client.lrange(key, 0, -1)]
    return found


def test_a_linear_pipeline_is_a_chain(redis_client: Any) -> None:
    pipeline = get_pipeline("tiny-omni")
    signature = chain.build(spec_of(pipeline, priority=9), pipeline)
    assert [t.options["queue"] for t in signature.tasks] == [
        "omniq.tiny-omni.ar", "omniq.tiny-omni.dit", "omniq.tiny-omni.decode",
    ]  # fmt: skip
    signature.apply_async(retry=False)
    assert redis_client.llen("omniq.tiny-omni.ar") == 1, "priority 9 is Celery's 0"
    (message,) = messages(redis_client, "tiny-omni", "ar")
    headers = message["headers"]
    assert (headers["task"], headers["id"], headers["shadow"]) == (
        "omniq.stage", "j1.ar", "tiny-omni.ar",
    )  # fmt: skip
    assert headers["kwargsrepr"].startswith("job=j1 stage=ar prompt='a red circle")
    assert len(json.dumps(message)) < 6000


def test_a_join_is_linked_by_every_parent_and_needs_no_chord() -> None:
    pipeline = graph("a>b", "a>c", "b>d", "c>d", "d>e")
    root = chain.build(spec_of(pipeline), pipeline)
    assert root.options["task_id"] == "j1.a"
    ids = [
        (below["options"]["task_id"], join["options"]["task_id"], last["options"]["task_id"])
        for below in root.options["link"]
        for join in below["options"]["link"]
        for last in join["options"]["link"]
    ]
    assert ids == [("j1.b", "j1.d.b", "j1.e"), ("j1.c", "j1.d.c", "j1.e")]
    assert "chord" not in json.dumps(root)


def test_several_first_stages_start_together(redis_client: Any) -> None:
    pipeline = graph("a>c", "b>c")
    chain.build(spec_of(pipeline), pipeline).apply_async(retry=False)
    assert len(messages(redis_client, "graph", "a")) == 1
    assert len(messages(redis_client, "graph", "b")) == 1


def test_publishing_follows_the_settings(own_valkey: Any) -> None:
    """Another broker in the same process, and none at all: an error at once."""
    import redis

    pipeline = get_pipeline("tiny-omni")
    chain.build(spec_of(pipeline), pipeline).apply_async(retry=False)
    client = redis.Redis(port=own_valkey.port)
    assert len(messages(client, "tiny-omni", "ar")) == 1
    assert app.conf.broker_url == get_settings().url
    own_valkey.stop()
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(OperationalError):
            chain.build(spec_of(pipeline), pipeline).apply_async(retry=False)
        assert time.monotonic() - began < 1.5
    own_valkey.start()
    chain.build(spec_of(pipeline), pipeline).apply_async(retry=False)


def test_clients_import_no_worker_code() -> None:
    code = (
        "import sys, omniq.chain\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'omniq_workers')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
