"""JSON files that come with models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omniq.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ConfigError: it cannot be read, or is no object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return found
