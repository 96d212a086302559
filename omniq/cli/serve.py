"""``omniq serve MODEL``, and what ``vllm serve MODEL --omni`` and ``vllm-omni serve`` call."""

from __future__ import annotations

import sys
from pathlib import Path

import click

HELP_FLAGS = {"-h", "--help"}
BAD_INPUT = 2


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
    options_metavar="",
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="MODEL [FLAGS]...")
@click.pass_context
def serve(ctx: click.Context, args: tuple[str, ...]) -> None:
    """Serve MODEL here: broker, workers and the API in one command, until Ctrl-C.

    MODEL is a model's folder or hub name (`omniq models` lists the families), or a pipeline's name
    or YAML file.

    FLAGS are those of `vllm serve`, read by vLLM's own parser: engine arguments go to the AR stage;
    --host, --port, --api-key and --served-model-name concern omniq's API. --engine says what runs
    the AR stage: vllm, transformers, or auto (vLLM where it is installed). Of diffusion models,
    --encoder says what encodes prompts (diffusers or vllm), --gpus how many GPUs the stages are
    spread over; --stage-overrides changes any stage. `--help=all` lists
    vLLM's flags, `--help=ModelConfig` those of one group. Without vLLM there are --dtype,
    --max-model-len, --max-num-seqs and --generation-config.
    """
    if not args or HELP_FLAGS & set(args):
        click.echo(ctx.get_help())
        ctx.exit(0 if args else BAD_INPUT)
    from omniq.serve.command import OmniServeCommand  # noqa: PLC0415 - `--help` needs none of it

    command = OmniServeCommand.from_args(args)
    for flag in command.flags.without_effect:
        click.echo(f"omniq: {flag} has no effect on omniq's API", err=True)
    sys.exit(command.run())


def serve_main() -> None:
    """``vllm serve MODEL --omni ...`` or ``vllm-omni serve MODEL ...``: run ``omniq serve``."""
    from omniq.cli.main import cli  # noqa: PLC0415 - it imports this module

    called = Path(sys.argv[0]).name
    if sys.argv[1:2] != ["serve"]:
        given = sys.argv[1] if len(sys.argv) > 1 else "nothing"
        click.echo(
            f"{called}: with omniq there is only `{called} serve MODEL`, not {given!r}; "
            "`omniq --help` lists omniq's commands",
            err=True,
        )
        sys.exit(BAD_INPUT)
    cli(args=sys.argv[1:], prog_name=called)
