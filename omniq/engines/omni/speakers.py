"""The voices of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omniq.errors import ConfigError, InvalidRequest

FILE = "spk_dict.pt"


class Speakers:
    """What a model brings for each of its voices; the first that is ``preferred`` is the default.

    Args:
        voices: by name.
        preferred: names, the default first.
    """

    def __init__(self, voices: dict[str, Any], preferred: tuple[str, ...] = ()) -> None:
        self._voices = voices
        self.default = next((n for n in preferred if n in voices), next(iter(voices)))

    @property
    def names(self) -> tuple[str, ...]:
        """As the model has them."""
        return tuple(self._voices)

    @classmethod
    def of_qwen2_5(cls, folder: Path) -> Speakers:
        """Of ``spk_dict.pt``: ``bos_token``, ``cond`` [1, d], ``ref_mel`` [1, frames, mel].

        Raises:
            ConfigError: there is no such file, or it holds something else.
        """
        try:
            voices = torch.load(folder / FILE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError) as exc:
            raise ConfigError(f"{folder / FILE} cannot be read: {exc}") from exc
        needed = {"bos_token", "cond", "ref_mel"}
        if not isinstance(voices, dict) or not voices:
            raise ConfigError(f"{folder / FILE} holds no voices")
        for name, voice in voices.items():
            if not isinstance(voice, dict) or not needed <= set(voice):
                raise ConfigError(f"{folder / FILE}: {name!r} needs {', '.join(sorted(needed))}")
        return cls(voices, ("Chelsie",))

    def named(self, name: str | None) -> str:
        """``name`` as the model has it, or the default.

        Raises:
            InvalidRequest: there is no such voice.
        """
        if name is None:
            return self.default
        found = next((n for n in self._voices if n.lower() == name.lower()), None)
        if found is None:
            message = f"no speaker {name!r}; allowed: {', '.join(self._voices)}"
            raise InvalidRequest(
                f"parameters.speaker: {message}",
                fields=[{"field": "parameters.speaker", "message": message}],
            )
        return found

    def text_bos(self, name: str) -> int:
        """Qwen2.5-Omni: the text token that begins what the voice says."""
        return int(self._voices[name]["bos_token"])

    def timbre(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Qwen2.5-Omni: float32 conditioning [1, d] and reference mel [1, frames, mel]."""
        voice = self._voices[name]
        cond, mel = voice["cond"].float(), voice["ref_mel"].float()
        return cond.reshape(1, -1), mel.reshape(1, *mel.shape[-2:])
