"""What makes other projects find omniq under the names they look for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

STAND_IN = Path(__file__).resolve().parent / "vllm_omni"


def real_vllm_omni() -> str | None:
    """Version of an installed vllm-omni, which then answers ``vllm serve --omni``; else None."""
    try:
        return version("vllm-omni")
    except PackageNotFoundError:
        spec = find_spec("vllm_omni")
        if spec is None or Path(spec.origin or "").parent == STAND_IN:
            return None
        return "(of unknown version)"
