"""Qwen2.5-Omni: thinker, talker and token2wav, by what config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from omniq.errors import ConfigError
from omniq.resolve.base import BuildOptions, ModelFamily
from omniq.resolve.files import CONFIG, ModelFiles

MAX_INPUT = 1 << 31
IN_FLIGHT = 16
#: Of ``generate`` in transformers, where a request says nothing.
THINKER = {"temperature": 0.0, "max_tokens": 1024}
TALKER = {
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.8,
    "repetition_penalty": 1.05,
    "max_tokens": 4096,
}
#: Flat parameters of a request that are the talker's too; the others are about the text.
SPOKEN = ["speaker", "seed", "deterministic"]
#: Chunks between the stages: tokens that the thinker, codes that the talker hands on at once.
#: Twelve codes are a block of token2wav's attention.
THINKER_TOKENS, TALKER_CODES = 1, 12
#: Chunks that may lie between two stages.
MOST_BEHIND = 1024
SAMPLE_RATE = 24_000


class Qwen25Omni(ModelFamily):
    """Text, pictures and sound in; text and speech out, both while they are made."""

    name: ClassVar[str] = "Qwen2.5-Omni"
    description: ClassVar[str] = "text, pictures and sound to text and speech"
    stages: ClassVar[tuple[str, ...]] = ("thinker", "talker", "token2wav")
    model_type: ClassVar[str] = "qwen2_5_omni"

    def matches(self, files: ModelFiles) -> bool:
        """By ``model_type``."""
        return (files.json(CONFIG) or {}).get("model_type") == self.model_type

    def build(self, files: ModelFiles, options: BuildOptions) -> dict[str, Any]:
        """The three stages; vLLM's flags that the thinker's engine has are the thinker's."""
        if options.engine == "vllm":
            raise ConfigError(
                f"--engine vllm: the thinker of {self.name} runs on transformers",
                hint="leave --engine out",
            )
        args = dict(options.engine_args)
        shared = {"model": files.model, "dtype": args.pop("dtype", "auto")}
        in_flight = args.pop("max_num_seqs", IN_FLIGHT)
        devices = self.devices(options.gpus)
        speaks = bool((files.json(CONFIG) or {}).get("enable_audio_output", True))
        inputs = {
            "prompt": {"type": "text", "required": False, "max_length": MAX_INPUT},
            "messages": {"type": "messages", "required": False, "max_length": MAX_INPUT},
            "token_ids": {"type": "token_ids", "required": False, "max_length": MAX_INPUT},
        }
        thinker = {
            **shared,
            "stage_id": "thinker",
            "engine_type": "AR",
            "engine": "omni-thinker",
            "input_modalities": ["text", "image", "audio"],
            "output_modalities": ["text", *(["hidden_states"] if speaks else [])],
            "engine_args": {"stream_tokens": THINKER_TOKENS, **args},
            "max_in_flight": in_flight,
            "defaults": THINKER,
            **devices["thinker"],
        }
        mapping: dict[str, Any] = {
            "description": f"{files.given} ({self.name})",
            "inputs": inputs,
            "stages": [thinker],
            "edges": [{"from": f"input.{name}", "to": f"thinker.{name}"} for name in inputs],
            "outputs": {
                "text": {"from": "thinker.text", "type": "text"},
                "finish_reason": {"from": "thinker.finish_reason", "type": "text"},
                "choices": {"from": "thinker.choices", "type": "json"},
            },
        }
        return self._spoken(mapping, shared, in_flight, devices) if speaks else mapping

    def _spoken(
        self,
        mapping: dict[str, Any],
        shared: Mapping[str, Any],
        in_flight: int,
        devices: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Any]:
        """``mapping`` with the stages that speak."""
        mapping["stages"] += [
            {
                **shared,
                "stage_id": "talker",
                "engine_type": "talk",
                "input_modalities": ["hidden_states"],
                "engine_args": {"stream_tokens": TALKER_CODES},
                "max_in_flight": in_flight,
                "shared_parameters": SPOKEN,
                "defaults": TALKER,
                **devices["talker"],
            },
            {
                **shared,
                "dtype": "float32",
                "stage_id": "token2wav",
                "engine_type": "vocode",
                "output_modalities": ["audio"],
                "max_in_flight": in_flight,
                **devices["token2wav"],
            },
        ]
        window = {"trigger": "window", "window": 1, "window_limit": MOST_BEHIND}
        mapping["edges"] += [
            {"from": "thinker.reply", "to": "talker.reply", **window},
            {"from": "talker.codes", "to": "token2wav.codes", **window},
        ]
        audio = {"from": "token2wav.audio", "type": "audio", "sample_rate": SAMPLE_RATE}
        mapping["outputs"]["audio"] = audio
        return mapping

    def devices(self, gpus: int) -> dict[str, dict[str, Any]]:
        """``devices`` by stage id. One GPU: all share it. Two: the thinker has its own. Three or
        more: each has one.
        """
        if gpus < 2:
            return {stage: {} for stage in self.stages}
        places = ("0", "1", "1") if gpus == 2 else ("0", "1", "2")
        return {s: {"devices": [d]} for s, d in zip(self.stages, places, strict=True)}
