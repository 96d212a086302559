"""Pipeline files: what is accepted, and errors that name file, line and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from omniq.config import available_pipelines, get_pipeline, load_pipeline
from omniq.config.loader import BUILTIN_DIR, parse_pipeline
from omniq.errors import ConfigError, UnknownPipeline
from omniq.settings import get_settings

GOOD = (BUILTIN_DIR / "tiny-omni.yaml").read_text()


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_pipeline(text, "p.yaml")
    return str(caught.value).splitlines()


def line_of(text: str, needle: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if needle in line)


def test_every_builtin_pipeline_is_valid_and_named_like_its_file() -> None:
    for path in BUILTIN_DIR.glob("*.yaml"):
        assert load_pipeline(path).name == path.stem


@pytest.mark.parametrize(
    ("old", "new", "where", "says"),
    [
        ("engine_type: AR", "engine_type: RNN", "stages.0.engine_type", "'AR', 'DiT'"),
        ("max_in_flight: 16", "max_in_flight: 0", "stages.0.max_in_flight", "(got 0)"),
        ("max_in_flight: 16", "max_inflight: 16", "stages.0.max_inflight", "not permitted"),
        ("builtin:tiny_omni", "builtin:big_omni", "stages.0.model", "allowed: builtin:tiny_omni"),
        ("temperature: 0.7", "warmth: 0.7", "stages.0.defaults", "allowed: max_tokens"),
        ("trigger", "trigger", "", ""),
    ],
)
def test_a_fault_names_line_and_path(old: str, new: str, where: str, says: str) -> None:
    if old == new:
        text = GOOD.replace(
            "{from: input.prompt, to: ar.prompt}", "{from: input.prompt, to: ar.prompt, window: 2}"
        )
        where, says, new = "edges.0", "'window' is given with trigger", "window: 2"
    else:
        text = GOOD.replace(old, new, 1)
    (fault,) = faults(text)
    assert fault.startswith(f"p.yaml:{line_of(text, new)}: {where}: ")
    assert says in fault


@pytest.mark.parametrize(
    ("old", "new", "where", "says"),
    [
        (
            "to: decode.latents",
            "to: vae.latents",
            "edges.2",
            "no such stage; allowed: ar, dit, decode",
        ),
        ("from: input.prompt", "from: input.text", "edges.0", "no such input; allowed: prompt"),
        (
            "from: decode.image",
            "from: x.image",
            "outputs.image",
            "no such stage; allowed: ar, dit, decode",
        ),
        (
            "from: input.prompt, to: ar.prompt",
            "from: decode.image, to: ar.prompt",
            "edges",
            "stages form a cycle",
        ),
        ("stage_id: ar", "stage_id: dit", "stages.1", "stage ids must differ"),
        ("stage_id: ar", "stage_id: input", "stages.0", "that names the request"),
        ("max_tokens: 48", "max_tokens: 65", "stages.0", "must be at most 64"),
    ],
)
def test_a_wrong_graph_is_refused(old: str, new: str, where: str, says: str) -> None:
    text = GOOD.replace(old, new)
    fault = faults(text)[0]
    if where.startswith("stages."):
        starts = [i for i, line in enumerate(text.splitlines(), 1) if "- stage_id" in line]
        line = starts[int(where.removeprefix("stages."))]
    else:
        line = line_of(text, "edges:" if where == "edges" else new)
    assert fault.startswith(f"p.yaml:{line}: {where}: ")
    assert says in fault
    assert "Value error" not in fault


FULL = "{from: ar.hidden_states, to: dit.prompt_embeds}"
WINDOW = FULL.replace("}", ", trigger: window, window: 2}")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "{from: input.prompt, to: ar.prompt}",
            "{from: input.prompt, to: ar.prompt, trigger: window, window: 1}",
            "an edge from the request has no window",
        ),
        (FULL, WINDOW.replace("window: 2", "window: 2, window_limit: 1"), "at least as large"),
        (FULL, FULL.replace("}", ", window_limit: 4}"), "is given with 'window'"),
        (
            FULL,
            f"{WINDOW}\n  - {{from: ar.text, to: dit.text}}",
            "all edges from 'ar' to 'dit' have a window, or none",
        ),
        (
            FULL,
            f"{WINDOW}\n  - {WINDOW.replace('prompt_embeds', 'again')}",
            "stage 'dit' reads the chunks of 'ar.hidden_states' once",
        ),
        (
            FULL,
            f"{FULL}\n  - {WINDOW.replace('dit.prompt_embeds', 'decode.hint')}",
            "stage 'decode' also waits for 'ar' through 'dit'",
        ),
    ],
)
def test_a_window_that_cannot_work_is_refused(old: str, new: str, says: str) -> None:
    """Such as one whose producer would wait for a reader that waits for the producer's end."""
    assert old in GOOD
    assert says in faults(GOOD.replace(old, new))[0]


def test_a_window_edge_bounds_how_far_its_reader_may_be_behind() -> None:
    def limit(window: int, more: str = "") -> int:
        new = FULL.replace("}", f", trigger: window, window: {window}{more}}}")
        edges = parse_pipeline(GOOD.replace(FULL, new), "p.yaml").edges
        return next(e.limit for e in edges if e.window)

    assert (limit(2), limit(20), limit(2, ", window_limit: 3")) == (16, 40, 3)


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "name: [", "a: 1\na: 2", "&a [*a]", "{" * 5000, "\x00", "!!python/x 1"]
)
def test_any_text_that_is_no_pipeline_is_a_config_error(text: str) -> None:
    assert faults(text)[0].startswith("p.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: x\n? [a]\n: b", "a key must be no list and no mapping"),
        ("name: x\n? {a: b}\n: c", "a key must be no list and no mapping"),
        ("name: x\nstages: &all [{engine_args: *all}]", "a value must not hold itself"),
        ("name: x\nstages: &all {engine_args: [*all]}", "a value must not hold itself"),
    ],
)
def test_what_no_json_could_say_is_refused(text: str, says: str) -> None:
    assert faults(text) == [f"p.yaml:2: not valid YAML: {says}"]


def test_a_value_may_be_given_twice_by_an_alias() -> None:
    text = GOOD.replace("defaults:", "defaults: &all", 1)
    assert parse_pipeline(text, "p.yaml").name == "tiny-omni"


def test_all_faults_are_reported_together() -> None:
    text = GOOD.replace("max_in_flight: 16", "max_in_flight: 0").replace("version: 1", "version: 0")
    assert len(faults(text)) == 2


def test_own_pipelines_come_from_files_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(GOOD.replace("name: tiny-omni", "name: mine"))
    monkeypatch.setenv("OMNIQ_PIPELINES", f'["{tmp_path}"]')
    get_settings.cache_clear()
    available_pipelines.cache_clear()
    try:
        assert get_pipeline("mine").name == "mine"
        with pytest.raises(UnknownPipeline, match="allowed: tiny-omni, mine"):
            get_pipeline("other")
        (tmp_path / "again.yaml").write_text(GOOD)
        available_pipelines.cache_clear()
        with pytest.raises(ConfigError, match="already defined"):
            available_pipelines()
    finally:
        monkeypatch.undo()
        get_settings.cache_clear()
        available_pipelines.cache_clear()


def test_the_graph_answers_who_feeds_whom() -> None:
    data = yaml.safe_load(GOOD)
    data["stages"].append(
        {"stage_id": "preview", "engine_type": "decode", "model": "builtin:tiny_omni"}
    )
    data["edges"].append({"from": "dit.latents", "to": "preview.latents"})
    pipeline = parse_pipeline(yaml.safe_dump(data), "p.yaml")
    assert not pipeline.is_linear
    assert pipeline.downstream("dit") == ["decode", "preview"]
    assert pipeline.upstream("preview") == ["dit"]
    assert pipeline.upstream("ar") == []
    assert get_pipeline("tiny-omni").is_linear


@pytest.mark.parametrize("name", ["../x", "a/b", ".x", "x y", "a" * 65, ""])
def test_an_output_is_named_as_a_file_may_be(name: str) -> None:
    text = GOOD.replace("\n  image: {from:", f"\n  {name!r}: {{from:")
    assert text != GOOD
    with pytest.raises(ConfigError, match=r"outputs\..*pattern"):
        parse_pipeline(text, "x.yaml")
