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
    layer: str | None = None
    """Field of the talker's configuration that says which of the thinker's hidden states it gets of
    the prompt; None: the last, behind the final norm."""
    places: str | None = None
    """Field of the thinker's configuration with the places of a second of video, where frames may
    stand between whole ones; None: they are rounded down."""

    def prompt_layer(self, folder: Path) -> int | None:
        """That layer for the model in ``folder``."""
        if self.layer is None:
            return None
        return int(read_json(folder / "config.json")["talker_config"][self.layer])

    def places_a_second(self, folder: Path) -> float | None:
        """Those of the model in ``folder``."""
        if self.places is None:
            return None
        from transformers import AutoConfig  # noqa: PLC0415 - slow import

        return float(getattr(AutoConfig.from_pretrained(folder).thinker_config, self.places))


QWEN2_5 = OmniFamily(
    "qwen2_5_omni",
    "transformers.models.qwen2_5_omni:Qwen2_5OmniThinkerForConditionalGeneration",
    "transformers.models.qwen2_5_omni:Qwen2_5OmniProcessor",
    "omniq.engines.omni.qwen2_5_talker:Qwen25Talker",
)
QWEN3 = OmniFamily(
    "qwen3_omni_moe",
    "transformers.models.qwen3_omni_moe:Qwen3OmniMoeThinkerForConditionalGeneration",
    "transformers.models.qwen3_omni_moe:Qwen3OmniMoeProcessor",
    "omniq.engines.omni.qwen3_talker:Qwen3Talker",
    "accept_hidden_layer",
    "position_id_per_seconds",
)
FAMILIES = {family.model_type: family for family in (QWEN2_5, QWEN3)}


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
