"""The command itself: resolve MODEL, then run broker, API and workers until Ctrl-C."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import yaml

from omniq.config import PipelineConfig
from omniq.config.loader import available_pipelines, load_pipeline
from omniq.errors import ConfigError
from omniq.runtime.ports import require_api_port
from omniq.runtime.processes import served_processes
from omniq.runtime.supervise import require, supervise
from omniq.serve.flags import ServeFlags, parse
from omniq.serve.target import numbered, resolve_model
from omniq.settings import get_settings

#: Characters of a prompt, unless OMNIQ_MAX_PROMPT_CHARS says otherwise: the model's context is the
#: bound that counts, and a million tokens are about so many characters.
LONGEST_PROMPT = 4_000_000


@dataclass(frozen=True)
class OmniServeCommand:
    """``omniq serve MODEL [flags]``, which is also ``vllm serve MODEL --omni [flags]``.

    Attributes:
        flags: what the command line asks for.
        pipeline: what will be served.
    """

    flags: ServeFlags
    pipeline: PipelineConfig

    @classmethod
    def from_args(cls, args: Sequence[str]) -> OmniServeCommand:
        """From the arguments behind the word ``serve``.

        Raises:
            ConfigError: MODEL or a flag cannot be served; the message says what is supported.
            SystemExit: 2, with the parser's message on stderr, for unknown flags and wrong values.
        """
        flags = parse(args)
        return cls(flags, named_apart(resolve_model(flags)))

    def environment(self) -> dict[str, str]:
        """The ``OMNIQ_*`` variables of all processes; writes the pipeline's file if it is new.

        The file is ``serve/<pipeline>.yaml`` in OMNIQ_DATA_DIR.
        """
        settings = get_settings()
        env = {"OMNIQ_DEFAULT_PIPELINE": self.pipeline.name}
        if available_pipelines().get(self.pipeline.name) != self.pipeline:
            path = _file_of(self.pipeline)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pipeline_yaml(self.pipeline), encoding="utf-8")
            env["OMNIQ_PIPELINES"] = json.dumps([*settings.pipelines, str(path)])
        names = self.flags.served_names or (self.flags.model,)
        env["OMNIQ_SERVED_MODELS"] = json.dumps(dict.fromkeys(names, self.pipeline.name))
        if self.flags.host is not None:
            env["OMNIQ_API_HOST"] = self.flags.host
        if self.flags.port is not None:
            env["OMNIQ_API_PORT"] = str(self.flags.port)
        if self.flags.api_keys:
            env["OMNIQ_API_KEYS"] = json.dumps(self.flags.api_keys)
        for name, value in self.flags.settings.items():
            env[f"OMNIQ_{name.upper()}"] = str(value)
        if "max_prompt_chars" not in settings.model_fields_set:
            env["OMNIQ_MAX_PROMPT_CHARS"] = str(LONGEST_PROMPT)
        return env

    def run(self) -> int:
        """Start everything and stay until it ends; returns the exit status.

        Raises:
            ConfigError: the extra omniq[monitor], whose honcho runs the processes, is missing, or
                the API's port is in use.
        """
        require("honcho", user="omniq serve")
        settings = get_settings()
        require_api_port(self.flags.host or settings.api_host, self.flags.port or settings.api_port)
        return supervise(served_processes(self.pipeline), {**os.environ, **self.environment()})


def named_apart(pipeline: PipelineConfig) -> PipelineConfig:
    """``pipeline``, or ``NAME-2`` and so on where the name has gone to another model.

    Queues and the file that workers load have a pipeline's name, so two models of folders called
    alike would run each other's jobs. Who had the name first keeps it in OMNIQ_DATA_DIR, as long as
    its folder is there; a model's own file is written anew.
    """
    known = available_pipelines()
    if known.get(pipeline.name) == pipeline:
        return pipeline
    free = (p for n in count(1) if (p := numbered(pipeline, n)).name not in known)
    return next(named for named in free if not _is_anothers(_file_of(named), named))


def _file_of(pipeline: PipelineConfig) -> Path:
    return (get_settings().data_dir / "serve").resolve() / f"{pipeline.name}.yaml"


def _is_anothers(file: Path, pipeline: PipelineConfig) -> bool:
    """Whether a file written here is of models that are still there, all of them others."""
    if not file.is_file():
        return False
    try:
        theirs = {stage.model_path for stage in load_pipeline(file).stages}
    except ConfigError:  # of another version of omniq, or half written: nothing serves it
        return False
    ours = {stage.model_path for stage in pipeline.stages}
    return theirs.isdisjoint(ours) and not any(_is_gone(model) for model in theirs)


def _is_gone(model: str) -> bool:
    """Whether it is a folder, not a name on the hub, and is not there."""
    return Path(model).is_absolute() and not Path(model).exists()


def pipeline_yaml(pipeline: PipelineConfig) -> str:
    """A pipeline as a file that loads as the same pipeline."""
    data = pipeline.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return "# Written by `omniq serve`.\n" + yaml.safe_dump(data, sort_keys=False)
