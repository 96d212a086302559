"""Which store is shown for an edge is the one that producers choose."""

from __future__ import annotations

import time
from typing import Any

import pytest

from omniq.blobs.choice import BlobUse, Choice, Mode, Where, choose, where
from omniq.config import PipelineConfig
from omniq.jobs.edges import EdgeStore, edge_stores
from omniq.jobs.workers import WorkerInfo, WorkerState

STAGE = {"engine_type": "AR", "engine": "x:Y", "model": "none"}


@pytest.fixture(scope="module")
def pipeline() -> PipelineConfig:
    """``a.t`` goes to b and c, ``a.u`` to c alone."""
    return PipelineConfig.model_validate(
        {
            "name": "p",
            "inputs": {"prompt": {"type": "text"}},
            "stages": [{"stage_id": s, **STAGE} for s in "abc"],
            "edges": [
                {"from": "input.prompt", "to": "a.prompt"},
                {"from": "a.t", "to": "b.t"},
                {"from": "a.t", "to": "c.t"},
                {"from": "a.u", "to": "c.u"},
            ],
            "outputs": {"x": {"from": "c.x", "type": "text"}},
        }
    )


def worker(stage: str, host: str = "h1", **more: Any) -> WorkerInfo:
    now = time.time()
    fields: dict[str, Any] = {
        "id": f"{stage}@{host}", "pipeline": "p", "hostname": host, "pid": 1, "since": now,
        "seen": now, "state": WorkerState.READY,
        "blobs": BlobUse(mode="auto", shared_memory=True),
    }  # fmt: skip
    return WorkerInfo(**{**fields, **more}, stage=stage, host=host)


def shown(edges: list[EdgeStore]) -> list[tuple[str, str | None, str | None]]:
    return [(f"{e.source}>{e.target}", e.host, e.store) for e in edges]


@pytest.mark.parametrize(
    ("consumers", "expected"),
    [
        ([{"h"}, {"h"}], Where.SAME_HOST),
        ([], Where.SAME_HOST),
        ([{"h"}, {"h", "far"}], Where.OTHER_HOSTS),
        ([{"far"}], Where.OTHER_HOSTS),
        ([{"far"}, set()], Where.NONE_KNOWN),
    ],
)
def test_where_consumers_live(consumers: list[set[str]], expected: Where) -> None:
    assert where("h", consumers) is expected


@pytest.mark.parametrize("consumers", Where)
@pytest.mark.parametrize("mode", ["shm", "redis"])
def test_a_setting_forces_the_store(mode: Mode, consumers: Where) -> None:
    choice = choose(mode, shared_memory=True, consumers=consumers)
    assert choice == Choice(mode, f"forced by OMNIQ_BLOB_STORE={mode}")


def test_one_output_is_written_once_for_all_its_readers(pipeline: PipelineConfig) -> None:
    """A reader far away sends the whole output to Redis, and no other output."""
    found = edge_stores(pipeline, [worker("a"), worker("b", "h2"), worker("c")])
    assert shown(found) == [
        ("a.t>b.t", "h1", "redis"),
        ("a.t>c.t", "h1", "redis"),
        ("a.u>c.u", "h1", "shm"),
    ]
    assert found[1].reason == "consumers on other hosts"


def test_producers_on_two_hosts_are_two_entries(pipeline: PipelineConfig) -> None:
    workers = [worker("a"), worker("a", "h2"), worker("b"), worker("c")]
    found = [e for e in edge_stores(pipeline, workers) if e.source == "a.u"]
    assert shown(found) == [("a.u>c.u", "h1", "shm"), ("a.u>c.u", "h2", "redis")]


def test_consumers_that_failed_or_serve_another_pipeline_do_not_count(
    pipeline: PipelineConfig,
) -> None:
    others = [worker("c", "h2", pipeline="q"), worker("c", "h3", state=WorkerState.FAILED)]
    found = edge_stores(pipeline, [worker("a"), worker("b"), *others])
    assert {e.reason for e in found} == {"no live consumer known"}
    assert {e.store for e in found} == {"redis"}


def test_without_a_producer_there_is_no_choice(pipeline: PipelineConfig) -> None:
    found = edge_stores(pipeline, [worker("a", blobs=None), worker("b"), worker("c")])
    assert {(e.host, e.store, e.reason) for e in found} == {
        (None, None, "no worker of stage 'a' is ready")
    }


def test_a_producer_without_shared_memory_says_so(pipeline: PipelineConfig) -> None:
    bare = BlobUse(mode="auto", shared_memory=False)
    found = edge_stores(pipeline, [worker("a", blobs=bare), worker("b"), worker("c")])
    assert {(e.store, e.reason) for e in found} == {("redis", "the producer has no shared memory")}
