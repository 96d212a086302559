"""Qwen2.5-Omni and Qwen3-Omni: thinker, talker and vocoder, by what config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from omniq.errors import ConfigError
from omniq.resolve.base import BuildOptions, ModelFamily, as_flags
from omniq.resolve.files import CONFIG, ModelFiles
from omniq.resolve.language_model import conversation
from omniq.resolve.own_engines import placed, refuse_encoder

IN_FLIGHT = 16
#: The thinker's, by what it runs on.
ENGINES = {"transformers": "omni-thinker", "vllm": "omni-thinker-vllm"}
#: What the thinker on vLLM takes of a GPU that talker and vocoder share.
SHARED_GPU = 0.8
#: Arguments by vLLM's names that the thinker's engine on transformers has.
THINKER_ARGS = frozenset(
    {
        *("custom_chat_template", "chat_template_content_format", "default_chat_template_kwargs"),
        *("max_model_len", "generation_config"),
    }
)
#: Files beside a prompt. Videos stay files: a request's parameters say which of their frames are
#: taken, and whether their sound is.
MEDIA: Mapping[str, Mapping[str, Any]] = {
    "image": {"type": "image", "max_items": 16},
    "audio": {"type": "audio", "max_items": 16, "max_seconds": 300},
    "video": {"type": "video", "max_items": 16, "as_file": True},
}
#: Of ``generate`` in transformers, where a request says nothing.
THINKER = {"temperature": 0.0, "max_tokens": 1024}
TALKER = {"temperature": 0.9, "repetition_penalty": 1.05, "max_tokens": 4096}
#: Flat parameters of a request that are the talker's too; the others are about the text.
SPOKEN = ["speaker", "seed", "deterministic"]
#: Tokens of a chunk from thinker to talker.
THINKER_TOKENS = 1
#: Chunks that may lie between two stages.
MOST_BEHIND = 1024
SAMPLE_RATE = 24_000


class QwenOmni(ModelFamily):
    """Text, pictures, sound and video in; text and speech out, both while they are made."""

    description: ClassVar[str] = "text, pictures, sound and video to text and speech"
    #: Of config.json.
    model_type: ClassVar[str]
    #: Defaults of the talker beside those of both models.
    talker: ClassVar[Mapping[str, Any]]
    #: Codes, or frames of codes, of a chunk from talker to vocoder.
    talker_codes: ClassVar[int]
    #: What the last stage has.
    vocoder: ClassVar[Mapping[str, Any]]

    def matches(self, files: ModelFiles) -> bool:
        """By ``model_type``."""
        return (files.json(CONFIG) or {}).get("model_type") == self.model_type

    def build(self, files: ModelFiles, options: BuildOptions) -> dict[str, Any]:
        """The three stages; vLLM's flags are the thinker's, as far as its engine has them.

        Raises:
            ConfigError: arguments that the thinker's engine lacks are asked for.
        """
        # By itself the one that takes videos with all that may be said of them.
        engine = "transformers" if options.engine == "auto" else options.engine
        refuse_encoder(options, self.name)
        args = dict(options.engine_args)
        shared = {"model": files.model, "dtype": args.pop("dtype", "auto")}
        in_flight = args.pop("max_num_seqs", IN_FLIGHT)
        if engine == "transformers" and (unknown := sorted(set(args) - THINKER_ARGS)):
            raise ConfigError(
                f"{as_flags(unknown)}: the thinker of {self.name} runs on transformers, which has "
                f"only {', '.join(sorted(THINKER_ARGS))}",
                hint="--engine vllm has them; --stage-overrides gives each stage its own",
            )
        speaks = bool((files.json(CONFIG) or {}).get("enable_audio_output", True))
        if engine == "vllm" and speaks and options.gpus == 1:
            args = {"gpu_memory_utilization": SHARED_GPU, **args}
        thinker = {
            **shared,
            "stage_id": "thinker",
            "engine_type": "AR",
            "engine": ENGINES[engine],
            "input_modalities": ["text", *MEDIA],
            "output_modalities": ["text", *(["hidden_states"] if speaks else [])],
            "engine_args": {"stream_tokens": THINKER_TOKENS, **args},
            "max_in_flight": in_flight,
            "defaults": THINKER,
        }
        mapping: dict[str, Any] = {
            "description": f"{files.given} ({self.name})",
            "stages": [thinker],
            **conversation("thinker"),
        }
        mapping["inputs"] |= {name: {"required": False, **spec} for name, spec in MEDIA.items()}
        mapping["edges"] += [{"from": f"input.{n}", "to": f"thinker.{n}"} for n in MEDIA]
        if speaks:
            self._speak(mapping, shared, in_flight)
        mapping["stages"] = placed(mapping["stages"], options.gpus, self.plans)
        return mapping

    def _speak(self, mapping: dict[str, Any], shared: Mapping[str, Any], in_flight: int) -> None:
        """Add the stages that speak."""
        vocoder = self.stages[-1]
        mapping["stages"] += [
            {
                **shared,
                "stage_id": "talker",
                "engine_type": "talk",
                "input_modalities": ["hidden_states"],
                "engine_args": {"stream_tokens": self.talker_codes},
                "max_in_flight": in_flight,
                "shared_parameters": SPOKEN,
                "defaults": {**TALKER, **self.talker},
            },
            {
                **shared,
                **self.vocoder,
                "stage_id": vocoder,
                "engine_type": "vocode",
                "output_modalities": ["audio"],
                "max_in_flight": in_flight,
            },
        ]
        window = {"trigger": "window", "window": 1, "window_limit": MOST_BEHIND}
        mapping["edges"] += [
            {"from": "thinker.reply", "to": "talker.reply", **window},
            {"from": "talker.codes", "to": f"{vocoder}.codes", **window},
        ]
        audio = {"from": f"{vocoder}.audio", "type": "audio", "sample_rate": SAMPLE_RATE}
        mapping["outputs"]["audio"] = audio

    @property
    def plans(self) -> dict[int, dict[str, str]]:
        """With two GPUs the thinker has its own, with three each stage has one."""
        return {
            2: dict(zip(self.stages, ("0", "1", "1"), strict=True)),
            3: dict(zip(self.stages, ("0", "1", "2"), strict=True)),
        }


class Qwen25Omni(QwenOmni):
    """Qwen2.5-Omni."""

    name: ClassVar[str] = "Qwen2.5-Omni"
    stages: ClassVar[tuple[str, ...]] = ("thinker", "talker", "token2wav")
    model_type: ClassVar[str] = "qwen2_5_omni"
    talker: ClassVar[Mapping[str, Any]] = {"top_k": 40, "top_p": 0.8}
    # A block of token2wav's attention.
    talker_codes: ClassVar[int] = 12
    vocoder: ClassVar[Mapping[str, Any]] = {"engine": "omni-token2wav", "dtype": "float32"}


class Qwen3Omni(QwenOmni):
    """Qwen3-Omni."""

    name: ClassVar[str] = "Qwen3-Omni"
    stages: ClassVar[tuple[str, ...]] = ("thinker", "talker", "code2wav")
    model_type: ClassVar[str] = "qwen3_omni_moe"
    talker: ClassVar[Mapping[str, Any]] = {"top_k": 50}
    talker_codes: ClassVar[int] = 5
    vocoder: ClassVar[Mapping[str, Any]] = {"engine": "omni-code2wav"}
