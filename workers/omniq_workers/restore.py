"""Putting messages back into their queues: what a worker gives up, and what the dead have left.

kombu does so in transactions that watch all unacknowledged messages at once, which fail for as long
as anything goes on. Here one script puts one message back, if it is still noted as held.

What is put back gets a new delivery tag. Whoever held it before, and stood still meanwhile, then
neither acknowledges nor renews what another worker holds by now. Leases run by the server's clock:
those of the workers' hosts may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery.utils.log import get_logger
from kombu.utils import json as kombu_json
from redis.exceptions import ResponseError

from omniq_workers.messages import loads_leniently

logger = get_logger(__name__)

FOLDER = Path(__file__).parent
RENEW, OVERDUE, GIVE_BACK = (
    (FOLDER / f"{name}.lua").read_text() for name in ("renew", "overdue", "give_back")
)
#: Messages that one script looks at: Lua takes only so many arguments.
MOST = 500


class Restorer:
    """Of one channel.

    Args:
        unacked: keys of the unacknowledged messages (hash) and of their tags by time.
        lists: the Redis lists that a message goes back to: exchange, routing key, message.
        set_aside: keeps what is no message.
    """

    def __init__(
        self,
        unacked: tuple[str, str],
        lists: Callable[[str, str, dict[str, Any]], Sequence[str]],
        set_aside: Callable[[bytes], object],
    ) -> None:
        self._unacked, self._lists, self._set_aside = unacked, lists, set_aside

    def give_back(self, client: Any, tag: str, *, last: bool = False) -> bool:
        """Put a message back that this worker held. False: it does not hold it any more."""
        record = client.hget(self._unacked[0], tag)
        return record is not None and self._put(client, tag, record, last=last)

    def restore(self, client: Any, lease: float) -> int:
        """Put back every message whose lease of so many seconds has lapsed; their number."""
        count = 0
        while True:
            try:
                found = client.eval(OVERDUE, 2, *self._unacked, lease, MOST)
            except ResponseError as exc:  # no memory left, say; another try comes soon
                logger.warning("messages of lost workers are delivered later: %s", exc)
                return count
            for tag, record in zip(found[::2], found[1::2], strict=True):
                if self._put(client, tag.decode(), record, lease=lease):
                    count += 1
            if len(found) < 2 * MOST:
                break
        if count:
            logger.warning("%d messages of lost or wedged workers are delivered again", count)
        return count

    def _put(
        self,
        client: Any,
        tag: str,
        record: bytes,
        *,
        last: bool = False,
        lease: float | None = None,
    ) -> bool:
        try:
            noted: Any = loads_leniently(record)  # a list, as kombu notes it
            message, exchange, key = noted
            message.setdefault("headers", {})["redelivered"] = True
            properties = message["properties"]
            properties.setdefault("delivery_info", {})["redelivered"] = True
            properties["delivery_tag"] = str(uuid4())
            lists = self._lists(exchange, key, message)
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            logger.error("what was held as %s is no message (%r); set aside", tag, exc)
            self._set_aside(record)
            client.zrem(self._unacked[1], tag)
            client.hdel(self._unacked[0], tag)
            return False
        return bool(
            client.eval(
                GIVE_BACK,
                2 + len(lists),
                *self._unacked,
                *lists,
                tag,
                kombu_json.dumps(message),
                "LPUSH" if last else "RPUSH",
                "" if lease is None else lease,
            )
        )
