"""Pointing this Python process at one broker while it uses a system of its own.

Settings are process-wide (:func:`omniq.settings.get_settings`), and so is the Celery application
that publishes with them; hence one process talks to one broker at a time.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from omniq.errors import ConfigError
from omniq.runtime.external import safe_url
from omniq.settings import get_settings

_URL, _NAMESPACE = "OMNIQ_BROKER_URL", "OMNIQ_NAMESPACE"


@dataclass
class _State:
    url: str | None = None
    users: int = 0
    before: dict[str, str | None] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


_state = _State()


def bind(url: str, namespace: str | None = None) -> None:
    """Use ``url`` (and ``namespace``) from now on; undo it by :func:`unbind`.

    Raises:
        ConfigError: the process is bound to another broker, or the URL is none.
    """
    with _state.lock:
        if _state.users and _state.url != url:
            raise ConfigError(
                f"this process already uses the broker at {safe_url(_state.url or '')}",
                hint="close the OmniLLM that uses it first, or use another process",
            )
        if not _state.users:
            _state.before = {name: os.environ.get(name) for name in (_URL, _NAMESPACE)}
            _set({_URL: url, **({_NAMESPACE: namespace} if namespace else {})})
        _state.url = url
        _state.users += 1


def unbind() -> None:
    """The last user's call restores the settings that were there before."""
    with _state.lock:
        _state.users -= 1
        if not _state.users:
            _set(_state.before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    get_settings.cache_clear()
