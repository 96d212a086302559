"""Engines: the resident objects that compute a stage, and how they are found by name."""

from omniq.engines.registry import EngineInfo, create_engine, describe

__all__ = ["EngineInfo", "create_engine", "describe"]
