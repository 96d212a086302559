"""The configuration files of a model in a local folder or on the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from omniq.errors import ConfigError
from omniq.json_file import read_json

CONFIG = "config.json"
MODEL_INDEX = "model_index.json"
#: Of a pipeline, see omniq.config.pipeline.
MAX_NAME = 64


class ModelFiles:
    """What a model says of itself.

    Args:
        model: a folder, or the model's name on the hub.

    Attributes:
        given: the model as the user named it.
        model: what a stage loads: the absolute path of the folder, or the name on the hub.
    """

    def __init__(self, model: str) -> None:
        path = Path(model)
        self.given = model
        self.model = str(path.resolve()) if path.is_dir() else model
        self._read: dict[str, dict[str, Any] | None] = {}

    def json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a file of the model, such as ``scheduler/scheduler_config.json``;
        None: the model has no such file.

        Raises:
            ConfigError: there is no such model, or the file holds no JSON object.
        """
        if name not in self._read:
            path = self.path(name)
            self._read[name] = None if path is None else read_json(path)
        return self._read[name]

    def path(self, name: str) -> Path | None:
        """Where a file of the model is on this machine, downloaded if it must be; None: no such
        file.

        Raises:
            ConfigError: there is no such model.
        """
        if Path(self.model).is_dir():
            path = Path(self.model) / name
            return path if path.is_file() else None
        return _from_hub(self.model, name)

    @property
    def architectures(self) -> list[str]:
        """``architectures`` of ``config.json``: class names of transformers, often one."""
        return list((self.json(CONFIG) or {}).get("architectures") or ())

    @property
    def diffusers_class(self) -> str | None:
        """``_class_name`` of ``model_index.json``: the pipeline class of diffusers."""
        index = self.json(MODEL_INDEX)
        return None if index is None else str(index.get("_class_name") or "") or None

    @property
    def pipeline_name(self) -> str:
        """A pipeline's name made of the model's."""
        text = Path(self.given).name.lower()
        return re.sub(r"[^a-z0-9._-]+", "-", text).lstrip("._-")[:MAX_NAME] or "model"


def _from_hub(model: str, name: str) -> Path | None:
    from huggingface_hub import (  # noqa: PLC0415 - only models from a hub need it
        hf_hub_download,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (  # noqa: PLC0415
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
    )

    try:
        return Path(hf_hub_download(model, name))
    except RemoteEntryNotFoundError:
        return None
    except LocalEntryNotFoundError as exc:
        # Without a network the cache is all there is; a model is there with one of these.
        if any(isinstance(try_to_load_from_cache(model, n), str) for n in (CONFIG, MODEL_INDEX)):
            return None
        raise _unreachable(model, exc) from exc
    except (OSError, ValueError) as exc:
        raise _unreachable(model, exc) from exc


def _unreachable(model: str, exc: Exception) -> ConfigError:
    first = str(exc).strip().partition("\n")[0]
    return ConfigError(
        f"MODEL {model!r} is no pipeline and no folder, and the hub cannot be asked for it: {first}"
    )
