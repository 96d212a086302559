"""What README and docs name exists, and what exists is named there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import commands_page
import pytest
from omniq_api.app import create_app
from pydantic import BaseModel

from omniq.config import params, pipeline, stage
from omniq.jobs.model import JobState
from omniq.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docker/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/**/README.md")),
]
API_PAGES = ("docs/api.md", "docs/serving-llms.md", "docs/diffusion.md")
#: Where the keys of pipeline files, and the parameters of requests, are explained.
PIPELINE_PAGES = ("pipelines", "diffusion", "streams", "vllm", "api", "models/qwen2.5-omni")

#: A route in code: its method may stand in an earlier one of the same list.
ROUTE = re.compile(r"`(?:(GET|POST|DELETE) )?(/(?:v1/[^`?\s]+|health|ready))`")

#: A file of the repository, but no link: those are relative to their page.
FILE = re.compile(r"(?<![\w./(])((?:benchmarks|tests|tools|examples|omniq)/[\w/]+\.\w+)")


def ids(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def prose(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor that MkDocs and GitHub make of a heading."""
    words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading))
    return re.sub(r"[-\s]+", "-", words.strip().lower())


def anchors(page: Path) -> set[str]:
    return {slug(found) for found in re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_files_and_settings_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for file in FILE.findall(text):
        assert (ROOT / file).exists(), file
    for test in re.findall(r"(?<![\w/])test_\w+\.py", text):
        assert list(ROOT.glob(f"tests/**/{test}")), test
    settings = {f"OMNIQ_{name.upper()}" for name in Settings.model_fields}
    assert set(re.findall(r"OMNIQ_[A-Z_]*[A-Z](?!\w)", text)) <= settings


def routes(text: str) -> Iterator[tuple[str, str]]:
    method, end = "", -1
    for found in ROUTE.finditer(text):
        joined = text[end : found.start()] in (", ", " and ")
        method = found[1] or (method if joined else "")
        end = found.end()
        yield method, re.sub(r"\{\w+\}|NAME", "{}", found[2])


def test_the_routes_in_the_docs_are_those_of_the_api() -> None:
    operations = [
        (method.upper(), re.sub(r"\{\w+\}", "{}", path), operation)
        for path, methods in create_app().openapi()["paths"].items()
        for method, operation in methods.items()
    ]
    existing = {(method, path) for method, path, _ in operations}
    texts = [prose(ROOT / page) for page in API_PAGES]
    named = {pair for text in texts for pair in routes(text)}
    assert existing <= named
    assert {path for _, path in named} <= {path for _, path in existing}
    assert {pair for pair in named if pair[0]} <= existing
    told = " ".join(re.findall(r"`[^`]+`", " ".join(texts))).lower()
    for _, path, operation in operations:
        for parameter in operation.get("parameters", ()):
            name = parameter["name"].lower()
            assert parameter["in"] == "path" or re.search(rf"\b{name}\b", told), (path, name)


def test_every_type_of_event_is_in_the_docs() -> None:
    sources = [*ROOT.glob("omniq/jobs/lua/*.lua"), ROOT / "omniq/jobs/store.py"]
    made = {
        kind
        for source in sources
        for kind in re.findall(r"['\"]((?:job|stage)\.[a-z]+)['\"]", source.read_text())
    }
    ends = {f"job.{state.value}" for state in JobState if state.final}
    assert len(made) > 10
    assert made | ends <= set(re.findall(r"`([a-z.]+)`", (ROOT / "docs/api.md").read_text()))


def test_the_page_of_commands_is_what_they_say() -> None:
    assert commands_page.page() == (ROOT / "docs/commands.md").read_text()


def models() -> dict[str, type[BaseModel]]:
    return {
        name: model
        for module in (pipeline, stage, params)
        for name, model in vars(module).items()
        if isinstance(model, type)
        and issubclass(model, BaseModel)
        and model.__module__ == module.__name__
    }


@pytest.mark.parametrize("name", models())
def test_keys_of_pipeline_files_and_parameters_are_explained(name: str) -> None:
    text = "".join((ROOT / f"docs/{page}.md").read_text() for page in PIPELINE_PAGES)
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`|^```.*?^```", text, re.M | re.S))))
    keys = {field.alias or key for key, field in models()[name].model_fields.items()}
    assert keys <= named, keys - named
