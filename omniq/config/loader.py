"""Finding and reading pipelines, built-in ones and YAML files; errors name file and line."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from omniq.config.pipeline import PipelineConfig
from omniq.errors import ConfigError, UnknownPipeline
from omniq.settings import get_settings

BUILTIN_DIR = Path(__file__).resolve().parent.parent / "pipelines"
SUFFIXES = (".yaml", ".yml")
MAX_FILE_BYTES = 1 << 20


class _StrictLoader(yaml.SafeLoader):
    """Safe loading that refuses duplicate keys, which YAML itself would silently merge."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be no list and no mapping", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key!r}", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(text: str, origin: str) -> Any:
    """What a YAML text says.

    Raises:
        ConfigError: it is none, or holds what YAML's types cannot, such as a 13th month.
    """
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{origin}: not valid YAML: {exc}") from exc


def load_pipeline(path: Path) -> PipelineConfig:
    """Read one pipeline file.

    Raises:
        ConfigError: with every fault as ``file:line: where: what``.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    return parse_pipeline(text, str(path))


def parse_pipeline(text: str, origin: str) -> PipelineConfig:
    """Parse one pipeline from YAML text; ``origin`` names it in errors.

    Raises:
        ConfigError: as :func:`load_pipeline`.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_ends(root, set(), set())
        data = yaml.load(text, Loader=_StrictLoader)  # nosec B506 # a SafeLoader
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{origin}:{line}: not valid YAML: {exc.problem}") from exc
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{origin}: not valid YAML: {exc}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{origin}:1: a pipeline is a mapping, not {type(data).__name__}")
    try:
        return PipelineConfig.model_validate(data)
    except ValidationError as exc:
        raise ConfigError("\n".join(_faults(exc, root, origin))) from exc


def _check_ends(node: yaml.Node | None, around: set[int], seen: set[int]) -> None:
    """Raise a YAML error if the node holds itself, by an alias.

    Args:
        around: the nodes that hold it.
        seen: nodes that are known to hold none of those that hold them.
    """
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    if id(node) in around:
        message = "a value must not hold itself"
        raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
    around.add(id(node))
    for child in node.value:
        for part in child if isinstance(child, tuple) else (child,):
            _check_ends(part, around, seen)
    around.discard(id(node))
    seen.add(id(node))


def _faults(exc: ValidationError, root: yaml.Node | None, origin: str) -> list[str]:
    lines = []
    for error in exc.errors(include_url=False):
        # Faults between parts of a pipeline name their place themselves.
        loc = (*error["loc"], *error.get("ctx", {}).get("place", ()))
        where = ".".join(str(part) for part in loc) or "pipeline"
        given = error.get("input")
        message = error["msg"].removeprefix("Value error, ")
        shown = f" (got {given!r})" if isinstance(given, str | int | float | bool) else ""
        lines.append(f"{origin}:{_line_of(root, loc)}: {where}: {message}{shown}")
    return lines


def _line_of(node: yaml.Node | None, loc: tuple[int | str, ...]) -> int:
    """1-based line of the deepest YAML node that ``loc`` names."""
    line = 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            pair = next((p for p in node.value if p[0].value == str(part)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            if part >= len(node.value):
                break
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _files(entry: str) -> list[Path]:
    path = Path(entry)
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
    return [path]


@lru_cache(maxsize=1)
def available_pipelines() -> dict[str, PipelineConfig]:
    """All pipelines by name: built-in ones, then those of ``OMNIQ_PIPELINES``.

    Raises:
        ConfigError: a file is wrong, or two files define the same name.
    """
    found: dict[str, PipelineConfig] = {}
    origin: dict[str, Path] = {}
    for entry in [str(BUILTIN_DIR), *get_settings().pipelines]:
        for path in _files(entry):
            pipeline = load_pipeline(path)
            if pipeline.name in found:
                raise ConfigError(
                    f"{path}: pipeline {pipeline.name!r} is already defined by "
                    f"{origin[pipeline.name]}"
                )
            found[pipeline.name], origin[pipeline.name] = pipeline, path
    return found


def is_builtin(pipeline: PipelineConfig) -> bool:
    """Whether omniq brings the pipeline itself, so that it is there though nobody asked for it."""
    return (BUILTIN_DIR / f"{pipeline.name}{SUFFIXES[0]}").is_file()


def get_pipeline(name: str) -> PipelineConfig:
    """The pipeline of that name.

    Raises:
        UnknownPipeline: naming those that exist.
    """
    pipelines = available_pipelines()
    try:
        return pipelines[name]
    except KeyError:
        allowed = ", ".join(pipelines)
        raise UnknownPipeline(
            f"no pipeline {name!r}; allowed: {allowed}",
            fields=[{"field": "pipeline", "message": f"unknown pipeline; allowed: {allowed}"}],
        ) from None
