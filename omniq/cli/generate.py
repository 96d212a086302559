"""``omniq generate``: one request from the shell."""

from __future__ import annotations

import asyncio
import io
import mimetypes
import os
import sys
from pathlib import Path
from typing import Any

import click
import redis.asyncio

from omniq.async_client import AsyncOmniLLM
from omniq.cli.options import echo_json, pipeline_option
from omniq.config import PipelineConfig
from omniq.config.loader import read_yaml
from omniq.errors import BrokerUnavailable, OmniqError
from omniq.jobs.workers import WorkerRegistry
from omniq.redis_client import connect
from omniq.request_output import Artifact, OmniRequestOutput
from omniq.settings import get_settings


@click.command()
@click.argument("prompt")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to save it; the suffix says a picture's format. Further files: NAME-1, NAME-2, ...",
)
@pipeline_option
@click.option("--seed", type=click.IntRange(0), help="Same seed, same output.")
@click.option(
    "--param",
    "params",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of the pipeline, its value in YAML; may be repeated.",
)
@click.option(
    "--input",
    "more",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another input: a picture's, sound's or video's file, or a text; may be repeated.",
)
@click.option(
    "--idempotency-key", help="Sent again with the same key, the request is the same job."
)
@click.option(
    "--timeout", type=click.FloatRange(0, min_open=True), help="Seconds; then the job expires."
)
@click.option(
    "--allow-partial",
    is_flag=True,
    help="If a stage fails, or the time is over, save what was made without it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what the job store knows, as JSON.")
def generate(
    *,
    prompt: str,
    output: Path | None,
    pipeline: str,
    seed: int | None,
    params: tuple[str, ...],
    more: tuple[str, ...],
    idempotency_key: str | None,
    timeout: float | None,
    allow_partial: bool,
    as_json: bool,
) -> None:
    """Make one output from PROMPT and save it.

    Uses the running system (OMNIQ_BROKER_URL, or `omniq up` on this machine); if there is none,
    starts one for this request only. Without -o each result file is saved under its own name.
    """
    _check_writable(output)
    if output is not None:
        _check_suffix(output)
    parameters = _parameters(params)
    if seed is not None:
        parameters["seed"] = seed
    inputs = _pairs(more, "--input")
    options = {
        "idempotency_key": idempotency_key,
        "timeout": timeout,
        "allow_partial": allow_partial,
    }
    result = asyncio.run(_generate(pipeline, prompt, inputs, parameters, options))
    saved = _save(result, output)
    for name, why in result.missing.items():
        _note(f"warning: no {name}: stage {why.stage}: {why.error.get('message')}")
    if as_json:
        stages = {n: s.model_dump(mode="json") for n, s in result.stages.items()}
        missing = {n: why.model_dump(mode="json") for n, why in result.missing.items()}
        echo_json({"job_id": result.job_id, "values": result.values, "stages": stages,
                   "missing": missing, "files": [str(f) for f in saved]})  # fmt: skip
        return
    if result.text is not None:
        click.echo(result.text)
    for path in saved:
        click.echo(f"saved {path}", err=True)


def _parameters(params: tuple[str, ...]) -> dict[str, Any]:
    """Values as YAML, so that ``7``, ``1.5``, ``true``, ``[a, b]`` work; of one name the last."""
    found: dict[str, Any] = {}
    for name, text in _pairs(params, "--param"):
        found[name] = read_yaml(text, f"--param {name}")
    return found


def _pairs(given: tuple[str, ...], option: str) -> list[tuple[str, str]]:
    """``NAME=VALUE`` pairs."""
    found = []
    for item in given:
        name, equals, value = item.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{item!r} is not NAME=VALUE", param_hint=option)
        found.append((name, value))
    return found


def _inputs(config: PipelineConfig, given: list[tuple[str, str]]) -> dict[str, Any]:
    """Texts as they are, files as paths; several files of one name are a list.

    Raises:
        click.BadParameter: a text is given twice.
    """
    found: dict[str, Any] = {}
    files: dict[str, list[Path]] = {}
    for name, value in given:
        if name in config.files or name not in config.inputs:
            files.setdefault(name, []).append(Path(value))
        elif name in found:
            raise click.BadParameter(f"{name!r} is given twice", param_hint="--input")
        else:
            found[name] = value
    return found | {n: paths if len(paths) > 1 else paths[0] for n, paths in files.items()}


async def _generate(
    pipeline: str,
    text: str,
    inputs: list[tuple[str, str]],
    parameters: dict[str, Any],
    options: dict[str, Any],
) -> OmniRequestOutput:
    settings = get_settings()
    url = settings.url if not settings.embedded or await _is_up(pipeline) else None
    llm = AsyncOmniLLM(
        pipeline, broker_url=url, on_progress=lambda stage, state: _note(f"{stage} is {state}")
    )
    first = next(iter(llm.config.inputs))
    prompt = _inputs(llm.config, [(first, text), *inputs])
    llm.validate(prompt, parameters)  # before anything is started
    if url is None:
        _note("no running system found, starting one for this request")
    async with llm:
        final: OmniRequestOutput | None = None
        async for final in llm.stream(prompt, parameters, **options):
            _show_progress(final)
        assert final is not None
        return final


async def _is_up(pipeline: str) -> bool:
    """Whether ``omniq up`` serves the pipeline on this machine's embedded broker."""
    client = connect()
    try:
        return bool(await WorkerRegistry(client).all(pipeline))
    except (BrokerUnavailable, redis.asyncio.RedisError):
        return False
    finally:
        await client.aclose()


def _note(text: str) -> None:
    click.echo(f"omniq: {text}", err=True)


def _show_progress(output: OmniRequestOutput) -> None:
    if not sys.stderr.isatty():
        return
    steps = [f"{n} {s.step}/{s.total}" for n, s in output.stages.items() if s.total]
    end = "\n" if output.finished else ""
    click.echo(f"\r\033[K{output.state.value}  {'  '.join(steps)}", err=True, nl=False)
    click.echo(end, err=True, nl=False)


def _check_writable(output: Path | None) -> None:
    """Find out before anything is computed that the result could not be saved."""
    folder = Path() if output is None else output.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise click.BadParameter(f"{str(folder)!r} is no folder to write to", param_hint="--output")


def _check_suffix(output: Path) -> None:
    """Find out as early that nobody can write such a picture."""
    from PIL import Image  # noqa: PLC0415 - as in `_bytes_for`

    form = Image.registered_extensions().get(output.suffix.lower())
    if form is not None and form not in Image.SAVE:
        message = f"{output.suffix} files can be read only"
        raise click.BadParameter(message, param_hint="--output")


def _save(result: OmniRequestOutput, output: Path | None) -> list[Path]:
    """Write all result files; ``output`` names the first (``out.png``, then ``out-1.png``, ...)."""
    saved = []
    for index, artifact in enumerate(result.files):
        if output is None:
            path = Path(f"{result.job_id}-{artifact.name}")
            if not path.suffix:
                path = path.with_suffix(mimetypes.guess_extension(artifact.content_type) or ".bin")
        else:
            path = output if not index else output.with_stem(f"{output.stem}-{index}")
        data = _bytes_for(artifact, path)
        try:
            path.write_bytes(data)
        except OSError as exc:
            raise OmniqError(
                f"{path} cannot be written: {exc.strerror}",
                hint=f"the result is kept as artifact {artifact.name!r} of job {result.job_id}",
            ) from exc
        saved.append(path)
    return saved


def _bytes_for(artifact: Artifact, path: Path) -> bytes:
    """The file as made, or converted when another picture format is asked for by the suffix."""
    from PIL import Image  # noqa: PLC0415 - not needed before there is a picture

    wanted = Image.registered_extensions().get(path.suffix.lower())
    made = artifact.content_type.partition("/")
    if wanted is None or made[0] != "image" or wanted.lower() == made[2]:
        return artifact.data
    buffer = io.BytesIO()
    Image.open(io.BytesIO(artifact.data)).convert("RGB").save(buffer, wanted)
    return buffer.getvalue()
