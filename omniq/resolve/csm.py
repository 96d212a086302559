"""CSM: text to speech, by frames of codec codes that are decoded while more are made."""

from __future__ import annotations

from typing import Any, ClassVar

from omniq.resolve.base import BuildOptions, ModelFamily
from omniq.resolve.files import CONFIG, ModelFiles
from omniq.resolve.own_engines import refuse_engine

#: Two minutes at 12.5 frames a second; an end frame comes before.
MOST_FRAMES = 1500
#: Chunks of four frames that must be there before the codec starts.
WINDOW = 1
#: Of Mimi, where the model's configuration does not say.
SAMPLE_RATE = 24_000


class Csm(ModelFamily):
    """``CsmForConditionalGeneration`` as two stages with a window between them.

    Inputs: ``prompt``, and ``voice``, the number of a speaker; output ``audio``.
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
        args = dict(options.engine_args)
        dtype, in_flight = args.pop("dtype", "auto"), args.pop("max_num_seqs", 16)
        refuse_engine(files, self.name, options.engine, args)
        codec = (files.json(CONFIG) or {}).get("codec_config") or {}
        common = {"model": files.model, "dtype": dtype, "max_in_flight": in_flight}
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
            },
            "stages": [
                {
                    "stage_id": "ar",
                    "engine_type": "AR",
                    "engine": "csm",
                    "input_modalities": ["text"],
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
            ],
            "edges": [
                {"from": "input.prompt", "to": "ar.prompt"},
                {"from": "input.voice", "to": "ar.voice"},
                {"from": "ar.codes", "to": "codec.codes", "trigger": "window", "window": WINDOW},
            ],
            "outputs": {
                "audio": {
                    "from": "codec.audio",
                    "type": "audio",
                    "sample_rate": int(codec.get("sampling_rate") or SAMPLE_RATE),
                },
            },
        }
