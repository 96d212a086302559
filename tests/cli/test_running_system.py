"""Commands that look at, and use, a running system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from stand_in import stand_in

from omniq.runtime.local import LocalSystem


@pytest.fixture(scope="module", autouse=True)
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSystem]:
    """Its broker is in the environment, where the commands find it."""
    with stand_in(tmp_path_factory.mktemp("pipeline")), LocalSystem("stand-in") as running:
        yield running


def omniq(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omniq", *args],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def generate(prompt: str) -> str:
    done = omniq("generate", prompt, "--json", "--seed", "3")
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["job_id"])


def test_generate_prints_the_text() -> None:
    done = omniq("generate", "hello there")
    assert done.stdout == "HELLO THERE\n"


def test_generate_of_a_failing_job_is_one_clear_message() -> None:
    done = omniq("generate", "please fail")
    assert done.returncode == 1
    assert "told to fail" in done.stderr
    assert "Traceback" not in done.stderr


def test_jobs_are_listed_newest_first_and_filtered() -> None:
    older, newer = generate("older"), generate("newer")
    listed = [r["spec"]["id"] for r in json.loads(omniq("jobs", "list", "--json").stdout)]
    assert listed[:2] == [newer, older]
    assert newer in omniq("jobs", "list", "--state", "succeeded").stdout
    assert newer not in omniq("jobs", "list", "--state", "failed").stdout


def test_job_is_shown_with_stages_and_result() -> None:
    shown = omniq("jobs", "show", generate("look at me")).stdout
    assert "succeeded" in shown
    assert "first" in shown
    assert "second" in shown
    assert "text: LOOK AT ME" in shown


def test_events_of_a_job_in_order() -> None:
    lines = omniq("jobs", "events", generate("a b"), "--json").stdout.splitlines()
    types = [json.loads(line)["type"] for line in lines]
    assert types[0] == "job.queued"
    assert types[-1] == "job.succeeded"
    assert "stage.progress" in types


def test_cancel_of_an_ended_job_changes_nothing() -> None:
    job = generate("done")
    assert "succeeded" in omniq("jobs", "cancel", job).stdout


def test_unknown_job_is_one_clear_message() -> None:
    done = omniq("jobs", "show", "nope")
    assert done.returncode == 1
    assert "no job 'nope'" in done.stderr


def test_inspect_shows_workers_and_queues() -> None:
    seen = json.loads(omniq("inspect", "--json").stdout)
    assert {w["stage"]: w["state"] for w in seen["workers"]} == {
        "first": "ready",
        "second": "ready",
    }
    assert len(seen["queues"]) == 3
    assert "stand-in" in omniq("inspect").stdout


def test_inspect_shows_for_each_edge_which_store_and_why() -> None:
    seen = json.loads(omniq("inspect", "--json").stdout)
    hosts = {w["host"] for w in seen["workers"]}
    assert len(hosts) == 1
    assert seen["edges"] == [
        {
            "pipeline": "stand-in",
            "source": edge["source"],
            "target": edge["target"],
            "host": hosts.pop(),
            "store": "shm",
            "reason": "all consumers are on this host",
        }
        for edge in seen["edges"]
    ]
    text = omniq("inspect").stdout
    for edge in seen["edges"]:
        assert f"{edge['source']} -> {edge['target']}" in text
    assert "all consumers are on this host" in text


def test_inspect_shows_each_workers_pool() -> None:
    seen = json.loads(omniq("inspect", "--json").stdout)
    for worker in seen["workers"]:
        blobs = worker["blobs"]
        assert (blobs["mode"], blobs["shared_memory"]) == ("auto", True)
        assert blobs["used_bytes"] <= blobs["slab_bytes"] <= blobs["host_bytes"]
        assert blobs["max_bytes"] == 8 << 30
    assert "8192 MiB" in omniq("inspect").stdout


def test_wait_ready_returns_when_all_stages_are_ready() -> None:
    done = omniq("wait-ready", "--pipeline", "stand-in", "--timeout", "20")
    assert done.returncode == 0
    assert "stand-in/second ready" in done.stdout


def test_wait_ready_fails_with_a_diagnosis() -> None:
    done = omniq("wait-ready", "--pipeline", "tiny-omni", "--timeout", "0.5")
    assert done.returncode == 1
    assert "stage dit: no worker has reported" in done.stderr
