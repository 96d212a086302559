"""CSM: text to speech, by frames of codec codes that are decoded while more are made."""

from __future__ import annotations

from typing import Any, ClassVar

from omniq.resolve.base import BuildOptions, ModelFamily
from omniq.resolve.files import CONFIG, ModelFiles
from omniq.resolve.own_engines import own_options, placed

#: Two minutes at 12.5 frames a second; an end frame comes before.
MOST_FRAMES = 1500
#: Chunks of four frames that must be there before the codec starts.
WINDOW = 1
IN_FLIGHT = 16
#: The codec on another GPU does not take turns with the model.
PLANS = {2: {"ar": "0", "codec": "1"}}
#: Of Mimi, where the model's configuration does not say.
SAMPLE_RATE = 24_000


class Csm(ModelFamily):
    """``CsmForConditionalGeneration`` as two stages with a window between them.

    Inputs: ``prompt``; ``voice``, the number of a speaker; ``ref_audio`` and ``ref_text``, a
    recording to speak like and what is said there (as vLLM-Omni calls them); output ``audio``.
    """

    name: ClassVar[str] = "CSM"
    description: ClassVar[str] = "text to speech, streaming"
    stages: ClassVar[tuple[str, ...]] = ("ar", "codec")

    def matches(self, files: ModelFiles) -> bool:
        """By the model class."""
        return "CsmForConditionalGeneration" in files.architectures

    def build(self, files: ModelFiles, options: BuildOptions) -> dict[str, Any]:
        """Stages ``ar`` and ``codec``.

        Raises:
            ConfigError: an engine other than its own, or arguments of one, are asked for.
        """
        common = {"model": files.model, **own_options(files, self.name, options, IN_FLIGHT)}
        codec = (files.json(CONFIG) or {}).get("codec_config") or {}
        rate = int(codec.get("sampling_rate") or SAMPLE_RATE)
        stages: list[dict[str, Any]] = [
            {
                "stage_id": "ar",
                "engine_type": "AR",
                "engine": "csm",
                "input_modalities": ["text", "audio"],
                "defaults": {"max_tokens": MOST_FRAMES},
                **common,
            },
            {
                "stage_id": "codec",
                "engine_type": "decode",
                "engine": "codec",
                "output_modalities": ["audio"],
                **common,
            },
        ]
        return {
            "description": f"{files.given} ({self.name})",
            "inputs": {
                "prompt": {"type": "text", "description": "What is to be said."},
                "voice": {
                    "type": "text",
                    "required": False,
                    "max_length": 64,
                    "description": "Number of the speaker; default 0.",
                },
                "ref_audio": {
                    "type": "audio",
                    "required": False,
                    "requires": ["ref_text"],
                    "sample_rate": rate,
                    "description": "A recording, in whose voice is spoken.",
                },
                "ref_text": {
                    "type": "text",
                    "required": False,
                    "requires": ["ref_audio"],
                    "description": "What is said in the recording.",
                },
            },
            "stages": placed(stages, options.gpus, PLANS),
            "edges": [
                *(
                    {"from": f"input.{name}", "to": f"ar.{name}"}
                    for name in ("prompt", "voice", "ref_audio", "ref_text")
                ),
                {"from": "ar.codes", "to": "codec.codes", "trigger": "window", "window": WINDOW},
            ],
            "outputs": {
                "audio": {
                    "from": "codec.audio",
                    "type": "audio",
                    "sample_rate": rate,
                },
            },
        }
