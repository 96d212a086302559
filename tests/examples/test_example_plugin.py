"""The example package, installed by pip: its family, engine, output type and scheduler work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import served

SOURCE = Path(__file__).resolve().parents[2] / "examples/plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package, to be put on the path."""
    folder = tmp_path_factory.mktemp("plugin")
    copy = shutil.copytree(SOURCE, folder / "source")  # building leaves files behind
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    where = ["--no-build-isolation", "--target", str(folder / "lib"), str(copy)]
    subprocess.run([*command, *where], check=True)
    return folder / "lib"


@pytest.fixture
def on_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes that a test starts."""
    rest = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), *([rest] if rest else [])]))


def run(*args: str) -> str:
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_package_is_short() -> None:
    files = [SOURCE / "pyproject.toml", *SOURCE.glob("*.py")]
    assert sum(len(file.read_text().splitlines()) for file in files) < 100


@pytest.mark.usefixtures("on_path")
def test_commands_list_what_it_adds() -> None:
    models = {m["name"]: m for m in json.loads(run("-m", "omniq", "models", "--json"))}
    assert models["letters"]["from"] == "omniq-letters"
    assert models["letters"]["stages"] == ["count"]
    assert models["FLUX.1"]["from"] == "omniq"
    engines = json.loads(run("-m", "omniq", "engines", "--json"))
    assert {(e["engine_type"], e["name"], e["available"]) for e in engines} >= {
        ("AR", "letters", True)
    }


@pytest.mark.usefixtures("on_path")
def test_a_job_runs_through_its_family_engine_and_output_type(tmp_path: Path) -> None:
    """A real system, started by the model's folder."""
    folder = tmp_path / "my-letters"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "letters"}')
    with served(tmp_path, sys.executable, "-m", "omniq", "serve", str(folder)) as running:
        url = f"{running.url}/v1/jobs"

        def ask(prompt: str) -> Any:
            body = {"pipeline": "my-letters", "input": {"prompt": prompt}}
            return httpx.post(f"{url}?wait=30", json=body, timeout=40).json()

        job = ask("Hello, hall!")
        table = httpx.get(f"{url}/{job['id']}/artifacts/table")
        wrong = ask("123")
        assert running.stop() == []
    assert job["state"] == "succeeded", job
    assert job["pipeline"] == "my-letters"
    assert table.headers["content-type"].startswith("text/csv")
    assert table.text == "a,1\ne,1\nh,2\nl,4\no,1\n"
    assert wrong["state"] == "failed"
    assert "no letters" in wrong["error"]["message"]


SCHEDULE = """
from omniq.engines.diffusion.scheduler import Ticket, create_scheduler
from omniq.engines.diffusion.step_times import StepTimes
scheduler = create_scheduler("first_come", StepTimes(8, always=True))
tickets = [Ticket("a", priority=9), Ticket("b", priority=0)]
print(type(scheduler).__module__, [t.request_id for t in scheduler.pick(tickets[::-1], 0.0)])
"""


@pytest.mark.usefixtures("on_path")
def test_its_scheduler_is_found_by_name() -> None:
    assert run("-c", SCHEDULE).strip() == "omniq_letters ['a']"
