"""Webhooks: signed, tried again, never to where they may not go."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from api_support import BODY, eventually, play, problem, serving
from fastapi import FastAPI
from omniq_api import webhooks
from redis import Redis

from omniq import keys
from omniq.errors import InvalidRequest
from omniq.jobs.store import JobStore
from omniq.jobs.webhooks import Due, Schedule, Webhook, signed
from omniq.settings import get_settings
from omniq.submit import submit

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()


@dataclass
class Receiver:
    """An HTTP server that keeps what it is sent and answers as told."""

    url: str
    answers: list[int] = field(default_factory=list)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)


@pytest.fixture
def receiver(broker: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("OMNIQ_WEBHOOK_ALLOW", '["127.0.0.0/8"]')
    monkeypatch.setenv("OMNIQ_WEBHOOK_SCHEMES", '["http", "https"]')
    get_settings.cache_clear()
    found = Receiver("")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {k.lower(): v for k, v in self.headers.items()}
            found.got.append((headers, body))
            status = found.answers.pop(0) if found.answers else 204
            self.send_response(status)
            if status == 302:
                self.send_header("location", found.url + "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}/hook"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


async def got(receiver: Receiver, count: int) -> None:
    async def there() -> bool:
        return len(receiver.got) >= count

    await eventually(there, 15, f"{count} messages")


async def test_the_end_of_a_job_is_told_once_and_signed(
    receiver: Receiver, client: httpx.AsyncClient, store: JobStore
) -> None:
    hook = {"url": receiver.url, "secret": SECRET}
    answer = await client.post("/v1/jobs", json={**BODY, "webhook": hook})
    assert SECRET not in answer.text
    job = answer.json()
    await play(store, job["id"])
    await got(receiver, 1)
    headers, body = receiver.got[0]
    message = json.loads(body)
    assert message["type"] == "job.succeeded"
    assert (message["data"]["id"], message["data"]["state"]) == (job["id"], "succeeded")
    assert message["data"] == (await client.get(f"/v1/jobs/{job['id']}")).json()
    assert abs(time.time() - int(headers["webhook-timestamp"])) < 20
    text = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.new(b"s" * 32, text, hashlib.sha256).digest()
    assert headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()

    async def settled() -> bool:
        return not await store.redis.exists(keys.webhooks())

    await eventually(settled)
    assert len(receiver.got) == 1


async def test_a_delivery_that_fails_is_tried_again_with_the_same_id(
    receiver: Receiver,
    client: httpx.AsyncClient,
    store: JobStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A redirect is a failure: where it leads was not checked."""
    monkeypatch.setattr(webhooks, "PAUSES", (0.01, 0.01, 0.01, 0.01))
    receiver.answers = [500, 302, 404]
    body = {**BODY, "webhook": {"url": receiver.url}}
    job_id = (await client.post("/v1/jobs", json=body)).json()["id"]
    await client.post(f"/v1/jobs/{job_id}/cancel")
    await got(receiver, 4)
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert {json.loads(body)["type"] for _, body in receiver.got} == {"job.cancelled"}
    assert all("webhook-signature" not in headers for headers, _ in receiver.got)


async def test_one_that_never_succeeds_is_given_up(
    receiver: Receiver,
    client: httpx.AsyncClient,
    store: JobStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhooks, "PAUSES", (0.01,))
    receiver.answers = [500] * 10
    body = {**BODY, "webhook": {"url": receiver.url}}
    job_id = (await client.post("/v1/jobs", json=body)).json()["id"]
    await client.post(f"/v1/jobs/{job_id}/cancel")

    async def settled() -> bool:
        return len(receiver.got) == 2 and not await store.redis.exists(keys.webhooks())

    await eventually(settled, 15)


async def test_what_is_due_survives_the_processes(receiver: Receiver, store: JobStore) -> None:
    """The job ends while no process of the API runs."""
    with serving() as server:
        body = {**BODY, "webhook": {"url": receiver.url}}
        job_id = httpx.post(f"{server.url}/v1/jobs", json=body).json()["id"]
    await play(store, job_id)
    assert receiver.got == []
    with serving(), serving():
        await got(receiver, 1)
    assert [json.loads(body)["data"]["id"] for _, body in receiver.got] == [job_id]


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        ({"url": "http://127.0.0.1/"}, "webhook.url"),
        ({"url": "https://127.0.0.1/"}, "webhook.url"),
        ({"url": "https://169.254.169.254/x"}, "webhook.url"),
        ({"url": "file:///etc/passwd"}, "webhook.url"),
        ({"url": "https://no-such-host.invalid/"}, "webhook.url"),
        ({"url": "https://8.8.8.8/", "secret": "short"}, "webhook.secret"),
        ({"url": "https://8.8.8.8/", "secret": "whsec_AAAA"}, "webhook.secret"),
        ({"url": "https://8.8.8.8/", "more": 1}, "webhook.more"),
        ({}, "webhook.url"),
    ],
)
async def test_hooks_that_may_not_be_are_refused_with_the_request(
    client: httpx.AsyncClient, store: JobStore, hook: dict[str, Any], name: str
) -> None:
    found = problem(await client.post("/v1/jobs", json={**BODY, "webhook": hook}))
    assert (found.status, found.fields) == (422, [name])
    assert (await store.list())[0] == []


async def test_an_address_is_checked_again_when_it_is_used(
    receiver: Receiver, app: FastAPI, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was fine when the job came may not be now."""
    hook = Webhook(url=receiver.url)
    job = await submit(store, pipeline="tiny-omni", inputs={"prompt": "x"}, webhook=hook)
    record = await store.cancel(job.id)
    monkeypatch.setenv("OMNIQ_WEBHOOK_ALLOW", '["*"]')
    get_settings.cache_clear()
    with pytest.raises(InvalidRequest, match="not public"):
        await webhooks._post(record, hook)
    fault = await webhooks.Deliverer(store)._send(Due(job.id, hook, 1))
    assert fault is not None and "not public" in fault
    assert receiver.got == []


async def test_a_receiver_that_does_not_answer_holds_up_no_other(
    receiver: Receiver,
    client: httpx.AsyncClient,
    store: JobStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More messages for it than are sent at once, all due before the other one's."""
    monkeypatch.setenv("OMNIQ_WEBHOOK_TIMEOUT", "60")
    get_settings.cache_clear()
    deaf = socket.create_server(("127.0.0.1", 0), backlog=100)
    try:
        for url in [f"http://127.0.0.1:{deaf.getsockname()[1]}/"] * 40 + [receiver.url]:
            body = {**BODY, "webhook": {"url": url}}
            job_id = (await client.post("/v1/jobs", json=body)).json()["id"]
            await client.post(f"/v1/jobs/{job_id}/cancel")
        await got(receiver, 1)
    finally:
        deaf.close()


async def test_only_who_has_a_message_settles_it(store: JobStore, redis_client: Redis) -> None:
    """Neither one whose lease has lapsed nor, if the job has ended anew, that of the end before."""
    schedule = Schedule(store.redis)
    job = await submit(
        store,
        pipeline="tiny-omni",
        inputs={"prompt": "x"},
        webhook=Webhook(url="https://8.8.8.8/"),
    )
    await store.cancel(job.id)
    (first,) = await schedule.claim(9, 0.05)

    async def lapsed() -> bool:
        return bool(found := await schedule.claim(9, 60)) and not second.extend(found)

    second: list[Due] = []
    await eventually(lapsed)
    assert (second[0].job, second[0].tries) == (job.id, 2)
    await schedule.settle(first, None)
    assert redis_client.zcard(keys.webhooks()) == 1
    await store.redis.hset(keys.job(job.id), "state", "queued")
    await store.cancel(job.id)
    await schedule.settle(second[0], None)
    (third,) = await schedule.claim(9, 60)
    assert third.tries == 1
    await schedule.settle(third, None)
    assert redis_client.zcard(keys.webhooks()) == 0


async def test_a_job_that_ends_again_is_another_message(
    receiver: Receiver, client: httpx.AsyncClient, store: JobStore
) -> None:
    """As one that was tried again after its end: receivers know a message by its id."""
    body = {**BODY, "webhook": {"url": receiver.url}}
    job_id = (await client.post("/v1/jobs", json=body)).json()["id"]
    for count in (1, 2):
        await store.redis.hset(keys.job(job_id), "state", "queued")
        await store.cancel(job_id)
        await got(receiver, count)
        assert await store.redis.hget(keys.job(job_id), "hook|tries") == b"1"
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 2


async def test_a_hook_that_cannot_be_read_holds_up_no_other(
    receiver: Receiver, client: httpx.AsyncClient, store: JobStore
) -> None:
    body = {**BODY, "webhook": {"url": receiver.url}}
    for faulty in (True, False):
        job_id = (await client.post("/v1/jobs", json=body)).json()["id"]
        if faulty:
            await store.redis.hset(keys.job(job_id), "hook", '{"url":"x","later":1}')
        await client.post(f"/v1/jobs/{job_id}/cancel")
    await got(receiver, 1)
    assert json.loads(receiver.got[0][1])["data"]["id"] == job_id

    async def settled() -> bool:
        return not await store.redis.exists(keys.webhooks())

    await eventually(settled)


async def test_a_job_that_cannot_be_read_holds_up_no_other_and_is_given_up(
    receiver: Receiver,
    client: httpx.AsyncClient,
    store: JobStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of another version of omniq, for as long as none of that takes the message."""
    monkeypatch.setattr(webhooks, "PAUSES", (0.01,))
    body = {**BODY, "webhook": {"url": receiver.url}}
    for odd in (True, False):
        job_id = (await client.post("/v1/jobs", json=body)).json()["id"]
        if odd:
            await store.redis.hset(keys.job(job_id), "spec", b'{"future":1}')
        await store.cancel(job_id)
    await got(receiver, 1)
    assert json.loads(receiver.got[0][1])["data"]["id"] == job_id

    async def settled() -> bool:
        return not await store.redis.exists(keys.webhooks())

    await eventually(settled, 15)


def test_signatures_are_those_of_the_specification() -> None:
    """The example of the Standard Webhooks specification's reference libraries."""
    headers = signed(
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
