"""The command itself: resolve MODEL, then run broker, API and workers until Ctrl-C."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from omniq.config import PipelineConfig
from omniq.runtime.ports import require_api_port
from omniq.runtime.processes import served_processes
from omniq.runtime.supervise import require, supervise
from omniq.serve.flags import ServeFlags, parse
from omniq.serve.pipeline_file import PipelineFile, held
from omniq.serve.target import resolve_model
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
        file: the pipeline's own, which is held for this server; None: it is known without.
    """

    flags: ServeFlags
    pipeline: PipelineConfig
    file: PipelineFile | None = None

    @classmethod
    def from_args(cls, args: Sequence[str]) -> OmniServeCommand:
        """From the arguments behind the word ``serve``.

        Raises:
            ConfigError: MODEL or a flag cannot be served; the message says what is supported.
            SystemExit: 2, with the parser's message on stderr, for unknown flags and wrong values.
        """
        return cls.of(parse(args))

    @classmethod
    def of(cls, flags: ServeFlags) -> OmniServeCommand:
        """The same from flags that have been read; the pipeline's file is written and held.

        Raises:
            ConfigError: MODEL or a flag cannot be served, or there is no room for the file.
        """
        return cls(flags, *held(resolve_model(flags)))

    def environment(self) -> dict[str, str]:
        """The ``OMNIQ_*`` variables of all processes."""
        settings = get_settings()
        env = {"OMNIQ_DEFAULT_PIPELINE": self.pipeline.name}
        if self.file is not None:
            env["OMNIQ_PIPELINES"] = json.dumps([*settings.pipelines, str(self.file.path)])
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
