"""The request body cap."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniq_api.openai_compat.faults import INVALID, error_body
from omniq_api.problems import ProblemError, http_problem

LINGER = 1.0


class BodyLimitMiddleware:
    """Refuses bodies above ``limit`` bytes, announced or not, without ever holding more of them."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413 from the announced length, or fail the read that crosses the limit."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self.limit:
            answer = http_problem(Request(scope), self._too_large())
            await answer(scope, receive, _Lingering(receive, send))
            return
        taken = 0
        out: Send = send

        async def counting() -> Message:
            nonlocal taken, out
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.limit:
                out = _Lingering(receive, send)
                raise self._too_large()
            return message

        async def sending(message: Message) -> None:
            await out(message)

        await self.app(scope, counting, sending)

    def _too_large(self) -> ProblemError:
        # The rest of the body is not read, so the connection can serve nothing more.
        message = f"the body may have at most {self.limit} bytes"
        return ProblemError(
            413,
            "body_too_large",
            message,
            faults=[{"field": "body", "message": f"must have at most {self.limit} bytes"}],
            headers={"connection": "close"},
            # One document for both kinds of client: OpenAI's look for `error`.
            **error_body(message, INVALID, code="body_too_large", param="body"),
        )


class _Lingering:
    """A ``send`` that goes on taking the body for a moment before the response ends.

    Closing a connection on which data still arrives resets it, and the client may lose the answer
    it has not read yet. What is taken here is dropped.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self.receive, self.send = receive, send

    async def __call__(self, message: Message) -> None:
        """Send; in front of the end of the response, linger."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await self.send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    while (await self.receive()).get("more_body", False):
                        pass
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self.send(message)
