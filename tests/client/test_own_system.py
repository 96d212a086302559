"""OmniLLM without a running system: it starts one, and leaves nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from stand_in import stand_in

from omniq import AsyncOmniLLM, OmniLLM
from omniq.errors import BrokerUnavailable, ConfigError, NotReady
from omniq.runtime.private_broker import PrivateBroker
from omniq.settings import get_settings


def test_configured_broker_that_is_away_is_an_error_at_once() -> None:
    code = "from omniq import OmniLLM; OmniLLM(broker_url='redis://127.0.0.1:1/0')"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=20
    )
    assert done.returncode != 0
    assert BrokerUnavailable.__name__ in done.stderr


def test_own_system_is_started_and_stopped(tmp_path: Path) -> None:
    assert not PrivateBroker.in_use()
    with stand_in(tmp_path), OmniLLM("stand-in") as own:
        assert PrivateBroker.in_use()
        assert own.generate("hello")[0].text == "HELLO"
    assert not PrivateBroker.in_use()
    assert get_settings().embedded
    with pytest.raises(ConfigError, match="closed"):
        own.generate("hello")


def test_own_worker_that_dies_is_an_error_not_a_hang(tmp_path: Path) -> None:
    with stand_in(tmp_path), OmniLLM("stand-in") as own, pytest.raises(NotReady, match="first"):
        own.generate("die")


async def test_own_system_from_asyncio(tmp_path: Path) -> None:
    with stand_in(tmp_path):
        async with AsyncOmniLLM("stand-in") as own:
            assert (await own.generate("hello")).text == "HELLO"
    assert not PrivateBroker.in_use()
