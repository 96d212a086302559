"""A model as a pipeline of this Python process and of those that it starts.

A pipeline's name is that of its queues and of the file that workers load, so no two have the same:
the second of two folders called alike, or of one folder with other options, is ``NAME-2``.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from omniq.config import PipelineConfig, available_pipelines
from omniq.serve.flags import ServeFlags
from omniq.serve.pipeline_file import pipeline_yaml
from omniq.serve.target import numbered, resolve_model
from omniq.settings import get_settings

PIPELINES = "OMNIQ_PIPELINES"


def model_pipeline(model: str, options: Mapping[str, Any]) -> PipelineConfig:
    """What ``omniq serve MODEL`` would serve, made known under a name of its own; the same again
    if it was made known before.

    Args:
        model: as MODEL there.
        options: fields of :class:`~omniq.serve.flags.ServeFlags`: ``engine``, ``engine_args``,
            ``encoder``, ``gpus``, ``stage_overrides``.

    Raises:
        ConfigError: there is no such model, or the options do not fit it.
    """
    before = list(get_settings().pipelines)
    # What was made known here earlier must not be taken for a pipeline that the user has.
    _use([entry for entry in before if Path(entry).parent != _folder()])
    try:
        pipeline = resolve_model(ServeFlags(model, **options))
    finally:
        _use(before)
    known = available_pipelines()
    for number in count(1):
        named = numbered(pipeline, number)
        if known.get(named.name) == named:
            return named
        if named.name not in known:
            break
    file = _folder() / f"{named.name}.yaml"
    file.write_text(pipeline_yaml(named), encoding="utf-8")
    _use([*before, str(file)])
    return available_pipelines()[named.name]


def _use(files: list[str]) -> None:
    os.environ[PIPELINES] = json.dumps(files)
    get_settings.cache_clear()
    available_pipelines.cache_clear()


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """Removed when the interpreter ends."""
    return tempfile.TemporaryDirectory(prefix="omniq-pipelines-")


def _folder() -> Path:
    return Path(_temporary().name)
