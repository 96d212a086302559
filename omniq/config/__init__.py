"""Pipelines and stages as validated configuration."""

from omniq.config.loader import available_pipelines, get_pipeline, load_pipeline
from omniq.config.pipeline import EdgeConfig, InputConfig, OutputConfig, PipelineConfig
from omniq.config.stage import (
    DiTCacheConfig,
    DiTConfig,
    EngineType,
    Limit,
    Modality,
    OmniStageConfig,
    RetryPolicy,
)

__all__ = [
    "DiTCacheConfig",
    "DiTConfig",
    "EdgeConfig",
    "EngineType",
    "InputConfig",
    "Limit",
    "Modality",
    "OmniStageConfig",
    "OutputConfig",
    "PipelineConfig",
    "RetryPolicy",
    "available_pipelines",
    "get_pipeline",
    "load_pipeline",
]
