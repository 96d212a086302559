"""``--stage-overrides``: what a pipeline's stages have instead of what was built for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from omniq.config import OmniStageConfig, PipelineConfig
from omniq.config.loader import SUFFIXES, read_yaml
from omniq.errors import ConfigError

FLAG = "--stage-overrides"
#: A stage's id is what edges name, and its engine type what its inputs and outputs are.
FIXED = ("stage_id", "engine_type")


def read_overrides(given: str) -> dict[str, dict[str, Any]]:
    """Overrides by stage id, from a YAML file or from the text itself (YAML, so also JSON).

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    text = given
    if given.endswith(SUFFIXES):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{FLAG}: {given} cannot be read: {exc}") from exc
    found = read_yaml(text, FLAG)
    if not (isinstance(found, dict) and all(isinstance(v, dict) for v in found.values())):
        raise ConfigError(
            f"{FLAG}: must be a mapping of stage ids to fields of the stage, "
            'such as {"dit": {"devices": ["1"]}}, or a .yaml file with one'
        )
    return found


def overridden(pipeline: PipelineConfig, overrides: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """The pipeline's stages with ``overrides``: mappings are merged, other values replaced, and
    what is null is as if it had never been set.

    Raises:
        ConfigError: there is no such stage, or a value is wrong; the message says which.
    """
    ids = [s.stage_id for s in pipeline.stages]
    if unknown := [name for name in overrides if name not in ids]:
        raise ConfigError(f"{FLAG}: no stage {unknown[0]!r}; the stages are {', '.join(ids)}")
    return [_changed(s, overrides.get(s.stage_id, {})) for s in pipeline.stages]


def _changed(stage: OmniStageConfig, override: Mapping[str, Any]) -> OmniStageConfig:
    if not override:
        return stage
    if fixed := [name for name in FIXED if name in override]:
        raise ConfigError(f"{FLAG}: {stage.stage_id}.{fixed[0]} cannot be changed")
    merged = _merged(stage.model_dump(mode="json", exclude_unset=True), override)
    try:
        return OmniStageConfig.model_validate(merged)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        where = ".".join([stage.stage_id, *map(str, error["loc"])])
        raise ConfigError(f"{FLAG}: {where}: {error['msg']}") from exc


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(base)
    for name, value in over.items():
        if value is None:
            made.pop(name, None)
        elif isinstance(value, Mapping):
            before = made.get(name)
            made[name] = _merged(before if isinstance(before, Mapping) else {}, value)
        else:
            made[name] = value
    return made
