"""Loads vllm-omni's shared-memory connector out of its unpacked wheel, without vLLM.

The connector is used as it is. Around it only names are put in place that its modules import and
do not need for a tensor: vLLM's output classes, and vllm-omni's package ``__init__`` files, which
import the whole engine. ``pip download --no-deps vllm-omni`` and unpacking the wheel is all it
takes; msgspec and pillow must be installed.
"""

from __future__ import annotations

import ast
import importlib
import logging
import sys
import types
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

CONNECTORS = "vllm_omni.distributed.omni_connectors"
STAGE_UTILS = "vllm_omni.entrypoints.stage_utils"
HELPERS = ("shm_write_bytes", "shm_read_bytes")


def load_connector(folder: Path) -> type[Any]:
    """The class ``SharedMemoryConnector``; ``folder`` holds the package ``vllm_omni``."""
    outputs = _module("vllm.outputs")
    outputs.CompletionOutput = type("CompletionOutput", (), {})  # type: ignore[attr-defined]
    outputs.RequestOutput = type("RequestOutput", (), {})  # type: ignore[attr-defined]
    _module("vllm").outputs = outputs  # type: ignore[attr-defined]

    base = folder / "vllm_omni"
    for name in (
        "vllm_omni", "vllm_omni.entrypoints", "vllm_omni.distributed", CONNECTORS,
        f"{CONNECTORS}.utils", f"{CONNECTORS}.connectors",
    ):  # fmt: skip
        _module(name).__path__ = [str(base.joinpath(*name.split(".")[1:]))]
    loggers = _module(f"{CONNECTORS}.utils.logging")
    loggers.get_connector_logger = logging.getLogger  # type: ignore[attr-defined]

    # Two functions of a module that imports the engine: their own source, run by itself.
    source = ast.parse((base / "entrypoints" / "stage_utils.py").read_text(encoding="utf-8"))
    helpers = [n for n in source.body if isinstance(n, ast.FunctionDef) and n.name in HELPERS]
    stage_utils = _module(STAGE_UTILS)
    stage_utils.__dict__.update(_shm=shared_memory, Any=Any, logger=logging.getLogger(STAGE_UTILS))
    code = compile(ast.Module(body=list(helpers), type_ignores=[]), STAGE_UTILS, "exec")
    exec(code, stage_utils.__dict__)

    module = importlib.import_module(f"{CONNECTORS}.connectors.shm_connector")
    connector: type[Any] = module.SharedMemoryConnector
    return connector


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module
