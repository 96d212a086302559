"""The handler interface: one class per output type."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from omniq.config import OutputConfig
from omniq.errors import ConfigError, OmniqError

if TYPE_CHECKING:
    import torch

    from omniq.jobs.model import JobSpec


class OutputError(OmniqError):
    """A stage's output does not have the form its output type demands."""

    code = "output_error"


@dataclass(frozen=True, slots=True)
class OutputContext:
    """Whose output it is: goes into the metadata of files.

    ``parameters`` are the job's complete parameters by stage id; ``sample_rate`` is what the
    output's declaration says (hertz). ``pipeline`` is its name and version, ``NAME@N``.
    """

    job_id: str
    prompt: str = ""
    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sample_rate: int | None = None
    pipeline: str = ""

    @classmethod
    def of_job(cls, spec: JobSpec) -> OutputContext:
        """Of a job's request; the prompt is its first text."""
        prompt = next((v for v in spec.inputs.values() if isinstance(v, str)), "")
        pipeline = f"{spec.pipeline}@{spec.pipeline_version}"
        return cls(spec.id, prompt, spec.parameters, pipeline=pipeline)

    @property
    def seed(self) -> int | dict[str, int] | None:
        """The seed all stages used, or by stage id where they differ."""
        seeds = {s: p["seed"] for s, p in self.parameters.items() if p.get("seed") is not None}
        different = set(seeds.values())
        return seeds if len(different) > 1 else next(iter(different), None)

    @property
    def fps(self) -> float | None:
        """Frames of a video in a second, if the request or a stage's defaults say so."""
        return next((float(p["fps"]) for p in self.parameters.values() if p.get("fps")), None)

    def of_item(self, index: int) -> OutputContext:
        """The context of one of several results of one request: number ``index`` from 0, whose
        noise comes from seed + ``index``.
        """
        if not index:
            return self
        parameters = {
            stage: {**p, "seed": (p["seed"] + index) % 2**63} if p.get("seed") is not None else p
            for stage, p in self.parameters.items()
        }
        return replace(self, parameters=parameters)


@dataclass(frozen=True, slots=True)
class EncodedArtifact:
    """One finished file; ``meta`` are facts worth showing beside it (width, height, ...)."""

    name: str
    content_type: str
    data: bytes = field(repr=False)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessedOutput:
    """One pipeline output in its final form: small JSON, files, or both.

    ``artifact`` is the (first) file; ``more`` are those behind it, of a request for several.
    """

    value: Any = None
    artifact: EncodedArtifact | None = None
    more: tuple[EncodedArtifact, ...] = ()

    @property
    def artifacts(self) -> tuple[EncodedArtifact, ...]:
        """All files in order."""
        return () if self.artifact is None else (self.artifact, *self.more)


class OutputHandler(abc.ABC):
    """Encodes outputs of one type; stateless, safe to call from any thread."""

    #: Formats that ``OutputConfig.format`` may name, the default first; empty: none.
    formats: tuple[str, ...] = ()

    @abc.abstractmethod
    def encode(self, name: str, form: str, data: Any, context: OutputContext) -> ProcessedOutput:
        """Encode one output.

        Args:
            name: the pipeline output's name.
            form: one of ``formats``, or empty when there are none.
            data: the stage output: JSON, or a mapping of names to tensors.
            context: whose output it is.

        Raises:
            OutputError: ``data`` does not have the form this type demands.
        """

    def piece(self, name: str, form: str, data: Any, context: OutputContext) -> ProcessedOutput:
        """Encode one chunk of an output that is streamed; as :meth:`encode` unless a type has a
        form for parts.
        """
        return self.encode(name, form, data, context)

    def format_of(self, name: str, config: OutputConfig) -> str:
        """The configured format, or the type's default.

        Raises:
            ConfigError: the type has no such format; the message lists those it has.
        """
        if config.format is None:
            return self.formats[0] if self.formats else ""
        if config.format not in self.formats:
            raise ConfigError(
                f"output {name!r}: no format {config.format!r}; "
                f"allowed: {', '.join(self.formats) or 'none'}"
            )
        return config.format


def several(
    encode: Callable[[str, OutputContext, Any], EncodedArtifact],
    name: str,
    items: Iterable[Any],
    context: OutputContext,
) -> ProcessedOutput:
    """A file for each item: ``name``, then ``name-1``, ``name-2``, ...; ``meta`` has the index.

    Args:
        encode: makes one of them.
        name: the pipeline output's.
        items: at least one.
        context: of the whole request.
    """
    files = []
    for i, item in enumerate(items):
        files.append(encode(f"{name}-{i}" if i else name, context.of_item(i), item))
    if len(files) > 1:
        files = [replace(f, meta={**f.meta, "index": i}) for i, f in enumerate(files)]
    return ProcessedOutput(artifact=files[0], more=tuple(files[1:]))


def only_tensor(name: str, data: Any) -> torch.Tensor:
    """The one tensor of ``data``: itself, or the only entry of a mapping.

    Raises:
        OutputError: there is none, or several.
    """
    import torch  # noqa: PLC0415 - text pipelines need none

    if isinstance(data, Mapping) and len(data) == 1:
        data = next(iter(data.values()))
    if isinstance(data, torch.Tensor):
        return data
    has = f"{sorted(data)}" if isinstance(data, Mapping) else type(data).__name__
    raise OutputError(f"output {name!r}: needs one tensor, got {has}")


def check_pyav(name: str, form: str, plain: str) -> None:
    """Whether this process can write an output in a format that FFmpeg encodes.

    Args:
        plain: the format that needs nothing.

    Raises:
        ConfigError: PyAV is not installed.
    """
    if find_spec("av") is None:
        raise ConfigError(
            f"output {name!r}: format {form!r} needs PyAV, which is not installed",
            hint=f"pip install 'omniq[media]', or set format: {plain}",
        )


def rgb_items(name: str, data: Any, kind: str, axes: str) -> Iterable[Any]:
    """The items of the one tensor of ``data``: uint8 arrays of these axes, the last one RGB.

    Args:
        kind: what an item is called in errors.
        axes: of one item, such as ``H, W, 3``; a tensor with one axis more holds several.

    Raises:
        OutputError: it is something else, or empty.
    """
    tensor = only_tensor(name, data).detach().cpu()
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    one = axes.count(",") + 1
    if dtype != "uint8" or len(shape) not in (one, one + 1) or shape[-1] != 3 or 0 in shape:
        raise OutputError(f"output {name!r}: {kind} is uint8 [{axes}], not {dtype} {shape}")
    return tensor.numpy() if len(shape) > one else [tensor.numpy()]
