"""Commands that need no running system: fast, clear, and with the right exit codes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import free_port

from omniq import __version__
from omniq.cli.main import COMMANDS, cli
from omniq.config import get_pipeline
from omniq.runtime.processes import procfile
from omniq.settings import Settings, get_settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    yield
    get_settings.cache_clear()


def omniq(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omniq", *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def broken_file(folder: Path) -> Path:
    text = (ROOT / "omniq/pipelines/tiny-omni.yaml").read_text()
    path = folder / "broken.yaml"
    path.write_text(text.replace("engine_type: DiT", "engine_type: GAN"))
    return path


def test_version() -> None:
    assert omniq("--version").stdout.strip() == f"omniq, version {__version__}"


def test_help_lists_every_command_without_importing_them() -> None:
    code = (
        "import sys; from omniq.cli.main import cli; cli(['--help'], standalone_mode=False);"
        "heavy = {'pydantic', 'redis', 'celery', 'torch'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_exists_and_explains_itself(name: str) -> None:
    done = omniq(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage: omniq" in done.stdout


def test_config_lists_every_setting_with_its_meaning() -> None:
    rows = json.loads(omniq("config", "--json", OMNIQ_API_PORT="9000").stdout)
    by_name = {r["name"]: r for r in rows}
    assert set(by_name) == {f"OMNIQ_{n.upper()}" for n in Settings.model_fields}
    assert by_name["OMNIQ_API_PORT"]["value"] == 9000
    assert by_name["OMNIQ_API_PORT"]["default"] == 8000
    assert all(r["description"] for r in rows)


def test_config_marks_what_is_not_the_default() -> None:
    assert (
        "OMNIQ_API_PORT = 9000   (default: 8000)" in omniq("config", OMNIQ_API_PORT="9000").stdout
    )


def test_config_hides_passwords() -> None:
    env = {"OMNIQ_BROKER_URL": "redis://u:hunter2@h:1/0", "OMNIQ_FLOWER_AUTH": "me:hunter2"}
    done = omniq("config", **env)
    assert "hunter2" not in done.stdout
    assert "redis://u:***@h:1/0" in done.stdout
    assert "hunter2" in omniq("config", "--show-secrets", **env).stdout


def test_wrong_setting_is_one_clear_message() -> None:
    done = omniq("config", OMNIQ_API_PORT="many")
    assert done.returncode == 2
    assert "OMNIQ_API_PORT" in done.stderr
    assert "'many'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_list_that_is_no_json_is_said_so() -> None:
    done = omniq("config", OMNIQ_API_KEYS="secret")
    assert done.returncode == 2
    assert done.stderr.startswith("omniq: OMNIQ_API_KEYS: must be JSON: Expecting value")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OMNIQ_BROKER_URL", "redis://:hunter2@[", "Invalid IPv6 URL"),
        ("OMNIQ_BROKER_URL", "redis://:hunter2@h:99999/0", "Port out of range"),
        ("OMNIQ_BROKER_URL", "redis://:hunter2@h/first", "number of a database, not 'first'"),
        ("OMNIQ_BROKER_URL", "http://:hunter2@h", "must start with one of redis://"),
        ("OMNIQ_BLOB_REDIS_URL", "redis://:hunter2@", "must name a host"),
        ("OMNIQ_MESSAGE_KEYS", '["hunter2"]', "at least 16 characters"),
        ("OMNIQ_API_KEYS", '["hunter2", ""]', "must be keys that are not empty"),
        ("OMNIQ_API_KEYS", '[" hunter2"]', "must be keys that are not empty"),
    ],
)
def test_a_wrong_secret_is_named_and_not_repeated(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    get_settings.cache_clear()
    done = CliRunner().invoke(cli, ["config"])
    assert done.exit_code == 2
    assert name in done.output and message in done.output
    assert "hunter2" not in done.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["jobs", "show", "\udcff"], "must be valid Unicode"),
        (["dlq", "drop", "a", "\udcff"], "must be valid Unicode"),
        (["keys", "revoke", "\udcff"], "must be valid Unicode"),
        (["generate", "x", "--param", "seed=2001-99-99"], "--param seed: not valid YAML"),
        (["generate", "x", "--param", "seed=" + "[" * 3000], "--param seed: not valid YAML"),
        (["generate", "x", "-o", "x.psd"], ".psd files can be read only"),
        (["wait-ready", "--timeout", "nan"], "is not a number of seconds"),
        (["wait-ready", "--timeout", "-1"], "is not in the range"),
        (["reconcile", "--grace", "inf"], "is not a number of seconds"),
        (["serve", "tiny-omni", "--stage-overrides", "{a: 2001-99-99}"], "not valid YAML: month"),
        (["serve", "tiny-omni", "--api-key", ""], "--api-key: must not be empty"),
    ],
)
def test_bad_values_of_commands_are_named(args: list[str], message: str) -> None:
    get_settings.cache_clear()
    done = CliRunner().invoke(cli, args)
    assert done.exit_code == 2, done.output
    assert message in done.output


def test_doctor_goes_on_behind_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIQ_DEFAULT_PIPELINE", "nope")
    get_settings.cache_clear()
    done = CliRunner().invoke(cli, ["doctor"])
    assert done.exit_code == 1
    assert " BAD  no pipeline 'nope'" in done.output
    assert "vllm serve MODEL --omni" in done.output.partition("no pipeline")[2]


def test_a_variable_that_is_no_setting_is_said_with_what_was_meant() -> None:
    done = omniq("pipelines", OMNIQ_API_KEY="secret", OMNIQ_ZZZZZZZ="1")
    assert done.returncode == 0
    assert "omniq: OMNIQ_API_KEY is no setting; did you mean OMNIQ_API_KEYS?" in done.stderr
    assert "omniq: OMNIQ_ZZZZZZZ is no setting\n" in done.stderr
    assert "OMNIQ_API_KEY is" not in omniq("--parent", "0", "pipelines", OMNIQ_API_KEY="x").stderr


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in omniq("--debug", "config", OMNIQ_API_PORT="many").stderr


def test_pipelines_lists_the_built_in_one() -> None:
    assert "tiny-omni (version 1)" in omniq("pipelines").stdout
    listed = json.loads(omniq("pipelines", "--json").stdout)
    assert [s["stage_id"] for s in listed[0]["stages"]] == ["ar", "dit", "decode"]


def test_validate_accepts_a_good_file() -> None:
    done = omniq("validate", str(ROOT / "omniq/pipelines/tiny-omni.yaml"))
    assert done.returncode == 0
    assert "ok: pipeline tiny-omni, stages ar -> dit -> decode" in done.stdout


def test_validate_names_an_engine_that_is_not_known(tmp_path: Path) -> None:
    text = (ROOT / "omniq/pipelines/tiny-omni.yaml").read_text()
    path = tmp_path / "p.yaml"
    path.write_text(text.replace("stage_id: dit", "stage_id: dit\n    engine: paint"))
    done = omniq("validate", str(path))
    assert done.returncode == 1
    assert f"{path}: stages.1.engine: no DiT engine 'paint'; allowed: auto, " in done.stderr


def test_validate_names_file_and_line_of_every_faulty_file(tmp_path: Path) -> None:
    broken = broken_file(tmp_path)
    line = 1 + broken.read_text().splitlines().index("    engine_type: GAN")
    done = omniq("validate", str(broken), str(tmp_path / "absent.yaml"))
    assert done.returncode == 1
    assert f"{broken}:{line}: stages.1.engine_type" in done.stderr
    assert "absent.yaml: cannot be read" in done.stderr


def test_broken_pipeline_file_stops_other_commands_with_its_faults(tmp_path: Path) -> None:
    broken = broken_file(tmp_path)
    done = omniq("pipelines", OMNIQ_PIPELINES=json.dumps([str(broken)]))
    assert done.returncode == 2
    assert f"{broken}:" in done.stderr


def test_unknown_pipeline_and_stage_name_what_exists() -> None:
    done = omniq("worker", "--pipeline", "nope", "--stage", "ar")
    assert done.returncode == 2
    assert "allowed: tiny-omni" in done.stderr
    done = omniq("worker", "--pipeline", "tiny-omni", "--stage", "nope")
    assert done.returncode == 2
    assert "it has: ar, dit, decode" in done.stderr


def test_no_broker_is_one_clear_message() -> None:
    done = omniq("jobs", "list", OMNIQ_BROKER_URL="redis://127.0.0.1:1/0")
    assert done.returncode == 1
    assert "broker" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_system_on_this_machine_is_said_with_what_starts_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMNIQ_BROKER_URL", raising=False)
    done = omniq("jobs", "list", OMNIQ_BROKER_PORT=str(free_port()))
    assert done.returncode == 1
    assert "hint: start a system by `omniq up`" in done.stderr


def test_generate_refuses_bad_parameters_before_it_starts_anything() -> None:
    done = omniq("generate", "a red circle", "--param", "width=63")
    assert done.returncode == 2
    assert "parameters.width" in done.stderr
    assert "starting" not in done.stderr
    done = omniq("generate", "a red circle", "--input", "image=a.png")
    assert done.returncode != 0
    assert "input.image: unknown input; allowed: prompt" in done.stderr
    done = omniq("generate", "a red circle", "--input", "image")
    assert "'image' is not NAME=VALUE" in done.stderr
    done = omniq("generate", "a red circle", "--param", "width")
    assert done.returncode == 2
    assert "NAME=VALUE" in done.stderr


def test_flower_password_must_have_a_user() -> None:
    done = omniq("flower", OMNIQ_FLOWER_AUTH="secret")
    assert done.returncode == 2
    assert "user:password" in done.stderr


def test_engines_are_listed() -> None:
    assert "diffusers" in omniq("engines").stdout
    assert {"AR", "DiT", "decode"} <= {
        e["engine_type"] for e in json.loads(omniq("engines", "--json").stdout)
    }


def test_doctor_says_which_engine_each_stage_gets() -> None:
    done = omniq("doctor")
    assert done.returncode == 0, done.stdout
    assert "tiny-omni/dit on" in done.stdout
    assert "engine diffusers" in done.stdout
    assert "accelerator cache-dit" in done.stdout


def test_model_families_are_listed() -> None:
    lines = omniq("models").stdout.splitlines()
    assert lines[0].split() == ["FAMILY", "STAGES", "WHAT", "IT", "DOES", "FROM"]
    assert any(n.startswith("FLUX.2 ") and "encode -> dit -> decode" in n for n in lines)


def test_doctor_fails_without_the_configured_broker() -> None:
    done = omniq("doctor", OMNIQ_BROKER_URL="redis://127.0.0.1:1/0")
    assert done.returncode == 1
    assert "no answer from redis://127.0.0.1:1/0" in done.stdout


def test_procfile_in_the_repository_is_the_one_that_omniq_prints() -> None:
    assert (ROOT / "Procfile").read_text() == procfile(get_pipeline("tiny-omni"))
    assert omniq("up", "--print-procfile").stdout == (ROOT / "Procfile").read_text()


def test_the_configuration_page_is_up_to_date() -> None:
    assert omniq("config", "--markdown").stdout == (ROOT / "docs/configuration.md").read_text()


def test_an_output_that_cannot_be_written_is_refused_before_any_work() -> None:
    done = omniq("generate", "a red circle", "-o", "/nowhere/x.png")
    assert done.returncode == 2
    assert "no folder to write to" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        (("api",), "OMNIQ_API_PORT"),
        (("flower",), "OMNIQ_FLOWER_PORT"),
        (("up",), "OMNIQ_API_PORT"),
        (("up",), "OMNIQ_FLOWER_PORT"),
    ],
)
def test_port_in_use_is_a_clear_error(command: tuple[str, ...], setting: str) -> None:
    """Before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        free = {"OMNIQ_API_PORT": str(free_port()), "OMNIQ_FLOWER_PORT": str(free_port())}
        done = omniq(*command, **{**free, setting: port, "OMNIQ_FLOWER_AUTH": "a:b"})
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert setting in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_host_of_another_machine_is_a_clear_error() -> None:
    done = omniq("api", "--host", "192.0.2.1")
    assert done.returncode == 2
    assert "cannot listen on 192.0.2.1" in done.stderr
