"""Families whose AR stage runs on an engine of omniq's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniq.errors import ConfigError
from omniq.resolve.base import BuildOptions, as_flags
from omniq.resolve.files import ModelFiles


def own_options(
    files: ModelFiles, name: str, options: BuildOptions, in_flight: int
) -> dict[str, Any]:
    """What such a family takes of the options: ``dtype`` and ``max_in_flight`` of its stages.

    Args:
        files: the model.
        name: of the family.
        options: of the command line.
        in_flight: what ``max_num_seqs`` is by default.

    Raises:
        ConfigError: another engine, or arguments of one, are asked for.
    """
    args = dict(options.engine_args)
    taken = {
        "dtype": args.pop("dtype", "auto"),
        "max_in_flight": args.pop("max_num_seqs", in_flight),
    }
    if options.engine != "auto":
        raise ConfigError(
            f"--engine {options.engine}: the AR stage of {name} runs on an engine of its own",
            hint="leave --engine out",
        )
    refuse_encoder(options, name)
    if args:
        raise ConfigError(
            f"{files.given}: {as_flags(args)}: {name} has no stage on vLLM to take its arguments",
            hint="--stage-overrides gives each stage its own",
        )
    return taken


def refuse_encoder(options: BuildOptions, name: str) -> None:
    """Of a family without a text encoder that another engine could run.

    Raises:
        ConfigError: one is asked for.
    """
    if options.encoder != "diffusers":
        raise ConfigError(
            f"--encoder {options.encoder}: {name} has no text encoder that runs there",
            hint="leave --encoder out",
        )


def placed(
    stages: list[dict[str, Any]], gpus: int, plans: Mapping[int, Mapping[str, str]]
) -> list[dict[str, Any]]:
    """``stages`` with ``devices`` for that many GPUs.

    Args:
        stages: with their ``stage_id``.
        gpus: to spread over; one is shared by all.
        plans: a GPU for each stage id, by the least number of GPUs that a plan needs.
    """
    fitting = [needs for needs in plans if needs <= gpus]
    if not fitting:
        return stages
    plan = plans[max(fitting)]
    return [{**stage, "devices": [plan[stage["stage_id"]]]} for stage in stages]
