"""In which order messages leave a queue: by priority, but none waits for ever."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import redis
from omniq_workers.take import Taker

from omniq.celery import queue_keys

QUEUES = queue_keys("q")


@pytest.fixture
def taker(redis_client: redis.Redis) -> Taker:
    connection = redis_client.connection_pool.get_connection()
    return Taker(connection, "nothing")


def put(client: redis.Redis, priority: int, count: int) -> None:
    """Messages, as kombu has them, of one of Celery's priorities (0 first)."""
    for i in range(count):
        properties = {
            "delivery_tag": f"{priority}-{i}",
            "delivery_info": {"exchange": "", "routing_key": "q"},
        }
        client.lpush(QUEUES[priority], json.dumps({"properties": properties}))


def take(taker: Taker, most: int = 1) -> list[int]:
    """The priorities of the next messages."""
    taker.ask(["unacked", "unacked_index", "undecodable", *QUEUES], most)
    taken = taker.settle()
    if taken is None:
        return []
    tags = [json.loads(m)["properties"]["delivery_tag"] for m in taken.messages]
    return [int(tag.partition("-")[0]) for tag in tags]


def test_a_priority_under_a_steady_flood_of_others_is_served_all_the_same(
    redis_client: redis.Redis, taker: Taker
) -> None:
    """Nine floods, and a message of the last priority: it comes within 9 x 9 messages."""
    for priority in range(9):
        put(redis_client, priority, 100)
    put(redis_client, 9, 3)
    order = [priority for _ in range(243) for priority in take(taker)]
    places = [i for i, priority in enumerate(order) if priority == 9]
    assert len(places) == 3
    assert all(b - a <= 81 for a, b in zip([0, *places], places, strict=False)), places
    counts = Counter(order)
    assert counts[0] >= 100, "the first priority keeps nearly all the rest"
    assert all(counts[p] >= 3 for p in range(10)), counts


def test_many_messages_at_once_do_not_take_the_turns_of_the_others(
    redis_client: redis.Redis, taker: Taker
) -> None:
    put(redis_client, 0, 64)
    put(redis_client, 5, 8)
    taken = [take(taker, 8) for _ in range(8)]
    assert taken[0] == [0] * 8
    assert taken[1] == [5], "one of another list, and one only"
    assert taken[2] == [0] * 8


def test_without_a_flood_the_order_is_that_of_priority(
    redis_client: redis.Redis, taker: Taker
) -> None:
    for priority in (7, 3, 5):
        put(redis_client, priority, 2)
    assert [p for _ in range(6) for p in take(taker)] == [3, 3, 5, 5, 7, 7]
    assert take(taker) == []
    put(redis_client, 4, 20)
    assert take(taker, 20) == [4] * 20
