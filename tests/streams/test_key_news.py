"""Hearing of changed keys, also from a broker that does not tell of them."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from support import Valkey

from omniq.redis_client import connect
from omniq.settings import get_settings
from omniq.streams.news import KeyNews


@pytest.mark.parametrize("rules", [["+@all"], ["+@all", "-client|tracking"]])
async def test_a_waiter_hears_of_a_change_whether_or_not_the_broker_tells(
    broker: Valkey, aredis: Redis, monkeypatch: pytest.MonkeyPatch, rules: list[str]
) -> None:
    await aredis.execute_command("ACL", "SETUSER", "reader", "on", ">x", "~*", "&*", *rules)
    monkeypatch.setenv("OMNIQ_BROKER_URL", broker.url.replace("://", "://reader:x@"))
    get_settings.cache_clear()
    client = connect()
    news = KeyNews(client)
    with news.watch("key") as changed:
        assert await news.ask("EXISTS", "key") == 0
        await aredis.set("key", "x")
        await asyncio.wait_for(changed.wait(), 10)
        assert await news.ask("EXISTS", "key") == 1
    news.close()
    await client.aclose()
    await aredis.execute_command("ACL", "DELUSER", "reader")
