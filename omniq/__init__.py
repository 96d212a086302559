"""omniq: durable, distributed serving of omni-modality models on Celery.

The public names are imported on first use, so that ``import omniq`` stays fast and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from omniq.client import AsyncOmniLLM, OmniLLM
    from omniq.config import (
        DiTCacheConfig,
        DiTConfig,
        OmniStageConfig,
        PipelineConfig,
        load_pipeline,
    )
    from omniq.engines.diffusion.cache import DiTCacheManager
    from omniq.engines.diffusion.executor import DiffusersPipelineExecutor
    from omniq.engines.diffusion.runner import OmniDiffusionModelRunner
    from omniq.engines.diffusion.scheduler import OmniDiffusionScheduler
    from omniq.errors import JobFailed, OmniqError
    from omniq.outputs import MultimodalOutputProcessor
    from omniq.request_output import OmniRequestOutput
    from omniq.runtime.local import LocalSystem
    from omniq.serve.command import OmniServeCommand
    from omniq.vllm_plugin import OmniPlugin

__all__ = [
    "AsyncOmniLLM",
    "DiTCacheConfig",
    "DiTCacheManager",
    "DiTConfig",
    "DiffusersPipelineExecutor",
    "JobFailed",
    "LocalSystem",
    "MultimodalOutputProcessor",
    "OmniDiffusionModelRunner",
    "OmniDiffusionScheduler",
    "OmniLLM",
    "OmniPlugin",
    "OmniRequestOutput",
    "OmniServeCommand",
    "OmniStageConfig",
    "OmniqError",
    "PipelineConfig",
    "__version__",
    "load_pipeline",
]

_HOMES = {
    "AsyncOmniLLM": "omniq.client",
    "DiTCacheConfig": "omniq.config",
    "DiTCacheManager": "omniq.engines.diffusion.cache",
    "DiTConfig": "omniq.config",
    "DiffusersPipelineExecutor": "omniq.engines.diffusion.executor",
    "JobFailed": "omniq.errors",
    "LocalSystem": "omniq.runtime.local",
    "MultimodalOutputProcessor": "omniq.outputs",
    "OmniDiffusionModelRunner": "omniq.engines.diffusion.runner",
    "OmniDiffusionScheduler": "omniq.engines.diffusion.scheduler",
    "OmniLLM": "omniq.client",
    "OmniPlugin": "omniq.vllm_plugin",
    "OmniRequestOutput": "omniq.request_output",
    "OmniServeCommand": "omniq.serve.command",
    "OmniStageConfig": "omniq.config",
    "OmniqError": "omniq.errors",
    "PipelineConfig": "omniq.config",
    "load_pipeline": "omniq.config",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
