"""Families whose AR stage runs on an engine of omniq's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniq.errors import ConfigError
from omniq.resolve.files import ModelFiles


def refuse_engine(files: ModelFiles, name: str, engine: str, args: Mapping[str, Any]) -> None:
    """Refuse what a family with AR engines of its own has no use for.

    Args:
        files: the model.
        name: of the family.
        engine: that was asked for.
        args: engine arguments that the family did not take.

    Raises:
        ConfigError: there is any.
    """
    if engine == "vllm":
        raise ConfigError(f"{files.given}: the AR stage of {name} does not run on vLLM")
    if args:
        named = ", ".join(f"--{arg.replace('_', '-')}" for arg in sorted(args))
        raise ConfigError(
            f"{named}: {name} has no stage on vLLM to take its engine arguments",
            hint="write a pipeline file to give stages engine_args of their own",
        )
