"""Latents and other tensors as safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniq import __version__
from omniq.outputs.base import (
    EncodedArtifact,
    OutputContext,
    OutputError,
    OutputHandler,
    ProcessedOutput,
)

CONTENT_TYPE = "application/x-safetensors"


class TensorsHandler(OutputHandler):
    """A mapping of names to tensors becomes one safetensors file.

    Its header metadata names the job and the omniq version; dtypes are kept.
    """

    formats = ("safetensors",)

    def encode(self, name: str, form: str, data: Any, context: OutputContext) -> ProcessedOutput:
        """All tensors in one file; shapes and dtypes in ``meta``."""
        return ProcessedOutput(artifact=safetensors_artifact(name, data, context))


def safetensors_artifact(name: str, data: Any, context: OutputContext) -> EncodedArtifact:
    """The tensors of ``data`` (a mapping, or one tensor that then gets ``name``) as a file.

    Raises:
        OutputError: no tensors, or something else among them.
    """
    import torch  # noqa: PLC0415 - text pipelines need none
    from safetensors.torch import save  # noqa: PLC0415 - imports torch

    tensors = {name: data} if isinstance(data, torch.Tensor) else data
    if not isinstance(tensors, Mapping) or not tensors:
        raise OutputError(f"output {name!r}: needs tensors, got {type(data).__name__}")
    if strange := [k for k, t in tensors.items() if not isinstance(t, torch.Tensor)]:
        raise OutputError(f"output {name!r}: {strange[0]!r} is no tensor")
    # A clone each, because safetensors refuses tensors that share memory.
    ready = {k: t.detach().to("cpu", copy=True).contiguous() for k, t in tensors.items()}
    header = {"job_id": context.job_id, "software": f"omniq {__version__}"}
    meta = {
        "tensors": {
            k: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
            for k, t in ready.items()
        }
    }
    return EncodedArtifact(name, CONTENT_TYPE, save(ready, header), meta)
