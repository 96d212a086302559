"""The job store's Lua scripts, each a named file in ``lua/`` with ``_common.lua`` in front."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from redis.commands.core import AsyncScript

from omniq.redis_client import Client

FOLDER = Path(__file__).parent / "lua"
NAMES = (
    "create",
    "begin_stage",
    "progress",
    "finish_stage",
    "end_run",
    "cancel",
    "discard",
)


@lru_cache(maxsize=1)
def sources() -> dict[str, str]:
    """Complete source of every script by name."""
    common = (FOLDER / "_common.lua").read_text()
    return {name: common + "\n" + (FOLDER / f"{name}.lua").read_text() for name in NAMES}


def register(redis: Client) -> dict[str, AsyncScript]:
    """Script objects bound to a client; sent by SHA, loaded on first use."""
    return {name: redis.register_script(text) for name, text in sources().items()}
