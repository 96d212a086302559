"""The job store's Lua scripts, each a named file in ``lua/`` with those behind ``_`` in front."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from redis.exceptions import NoScriptError

from omniq import keys
from omniq.redis_client import Client, broker_errors
from omniq.settings import get_settings

FOLDER = Path(__file__).parent / "lua"


@lru_cache(maxsize=1)
def sources() -> dict[str, str]:
    """Complete source of every script by name."""
    common = "\n".join(file.read_text() for file in sorted(FOLDER.glob("_*.lua")))
    files = sorted(FOLDER.glob("[a-z]*.lua"))
    return {file.stem: common + "\n" + file.read_text() for file in files}


class Script:
    """One script on one client: sent by its digest, and whole when the server does not know it."""

    def __init__(self, redis: Client, source: str) -> None:
        self._redis, self._source = redis, source
        self._digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run it. Raises redis-py's errors."""
        try:
            return await self._redis.execute_command(
                "EVALSHA", self._digest, len(keys), *keys, *args
            )
        except NoScriptError:
            return await self._redis.execute_command("EVAL", self._source, len(keys), *keys, *args)


def call(job_id: str, args: Sequence[Any], *more_keys: str) -> tuple[list[str], list[Any]]:
    """Keys and arguments of a script on one job, as ``lua/_common.lua`` has them; ``args`` and
    ``more_keys`` are the script's own.
    """
    settings = get_settings()
    common = (
        int(settings.dead_letter_retention * 1000),
        settings.max_dead_letters,
        int(settings.retention * 1000),
        settings.max_events,
        f"{settings.namespace}:",
    )
    names = [keys.job(job_id), keys.job_events(job_id), keys.job_blobs(job_id), *more_keys]
    return names, [*args, *common]


class JobScripts:
    """The scripts on one client."""

    def __init__(self, redis: Client) -> None:
        self._scripts = {name: Script(redis, text) for name, text in sources().items()}

    async def run(self, name: str, job_id: str, args: Sequence[Any], *more_keys: str) -> Any:
        """Run a script on one job; the arguments are those of :func:`call`.

        Raises:
            BrokerUnavailable: no answer.
        """
        names, arguments = call(job_id, args, *more_keys)
        with broker_errors():
            return await self._scripts[name](names, arguments)
