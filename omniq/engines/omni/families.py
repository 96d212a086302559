"""The omni models known here, by ``model_type`` of their ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omniq.errors import ConfigError
from omniq.json_file import read_json


@dataclass(frozen=True, slots=True)
class OmniFamily:
    """Where transformers has a model's parts, ``module:Class``."""

    model_type: str
    thinker: str
    processor: str
    talker: str
    """The talker's adapter here, see :mod:`omniq.engines.omni.talker`."""


QWEN2_5 = OmniFamily(
    "qwen2_5_omni",
    "transformers.models.qwen2_5_omni:Qwen2_5OmniThinkerForConditionalGeneration",
    "transformers.models.qwen2_5_omni:Qwen2_5OmniProcessor",
    "omniq.engines.omni.qwen2_5_talker:Qwen25Talker",
)
FAMILIES = {family.model_type: family for family in (QWEN2_5,)}


def family_of(folder: Path) -> OmniFamily:
    """The family of the model in ``folder``.

    Raises:
        ConfigError: none of those known here.
    """
    found = read_json(folder / "config.json").get("model_type")
    if found not in FAMILIES:
        allowed = ", ".join(FAMILIES)
        raise ConfigError(f"{folder} is no omni model ({found!r}); allowed: {allowed}")
    return FAMILIES[found]
