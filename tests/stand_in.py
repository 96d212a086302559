"""The pipeline `stand-in`: two stages of :mod:`stand_in_engines`, ready in a second, no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

YAML = """
name: stand-in
inputs:
  prompt: {{type: text}}
stages:
  - {{stage_id: first, engine_type: AR, engine: "stand_in_engines:Words", model: none,
     output_modalities: [text], max_in_flight: 8, engine_args: {first}}}
  - {{stage_id: second, engine_type: AR, engine: "stand_in_engines:Words", model: none,
     output_modalities: [text], max_in_flight: 8, engine_args: {second}}}
edges:
  - {{from: input.prompt, to: first.prompt}}
  - {{from: first.text, to: second.prompt}}
outputs:
  text: {{from: second.text, type: text}}
  draft: {{from: first.text, type: text}}
"""


def write_pipeline(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> Path:
    path = folder / "stand-in.yaml"
    path.write_text(YAML.format(first=json.dumps(first), second=json.dumps(second)))
    return path


@contextmanager
def stand_in(
    folder: Path, first: dict[str, Any] | None = None, second: dict[str, Any] | None = None
) -> Iterator[dict[str, str]]:
    """Makes `stand-in` available here and in child processes; yields the environment it set."""
    from omniq.config import available_pipelines
    from omniq.settings import get_settings

    env = {
        "OMNIQ_PIPELINES": json.dumps([str(write_pipeline(folder, first or {}, second or {}))]),
        "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}",
        "OMNIQ_HEARTBEAT": "0.3",
        "OMNIQ_DEFAULT_PIPELINE": "stand-in",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        for cached in (get_settings, available_pipelines):
            cached.cache_clear()
        yield env
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()
