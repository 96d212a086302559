"""What a request's body may be: how large, how slow, and not compressed."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniq_api.openai_error import INVALID, error_body
from omniq_api.problems import ProblemError, http_problem

LINGER = 1.0


class BodyLimitMiddleware:
    """Refuses bodies above ``limit`` bytes, announced or not, without ever holding more of them;
    bodies that have not come whole within ``seconds``; and compressed ones, which are not unpacked.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self.app, self.limit, self.seconds = app, limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer from what is announced, or fail the read that crosses a limit."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = scope["headers"]
        refusal: ProblemError | None = None
        announced = next((v for k, v in headers if k == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self.limit:
            refusal = self._too_large()
        packed = next((v for k, v in headers if k == b"content-encoding"), b"identity")
        has_body = announced != b"0" or any(k == b"transfer-encoding" for k, _ in headers)
        if has_body and packed.strip().lower() not in (b"identity", b""):
            code, accepted = "unsupported_content_encoding", {"accept-encoding": "identity"}
            refusal = _refusal(415, code, "must not be compressed", **accepted)
        if refusal is not None:
            answer = http_problem(Request(scope), refusal)
            await answer(scope, receive, _Lingering(receive, send))
            return
        taken = 0
        until: float | None = None
        whole = answered = False
        out: Send = send

        async def counting() -> Message:
            nonlocal taken, out, until, whole
            if whole:  # what is waited for now is the client's leaving
                return await receive()
            if until is None:
                until = asyncio.get_running_loop().time() + self.seconds
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                if answered:  # a body that nobody needed
                    return {"type": "http.disconnect"}
                raise self._too_slow() from None
            whole = not message.get("more_body", False)
            taken += len(message.get("body", b""))
            if taken > self.limit and answered:
                return {"type": "http.disconnect"}
            if taken > self.limit:
                out = _Lingering(receive, send)
                raise self._too_large()
            return message

        async def sending(message: Message) -> None:
            nonlocal answered
            answered = True
            await out(message)

        await self.app(scope, counting, sending)

    def _too_slow(self) -> ProblemError:
        return _refusal(408, "body_too_slow", f"must have come whole within {self.seconds:g} s")

    def _too_large(self) -> ProblemError:
        return _refusal(413, "body_too_large", f"must have at most {self.limit} bytes")


def _refusal(status: int, code: str, message: str, **headers: str) -> ProblemError:
    """A problem that OpenAI's clients understand as well.

    The rest of the body is not read, so the connection can serve nothing more.
    """
    detail = f"the body {message}"
    return ProblemError(
        status,
        code,
        detail,
        faults=[{"field": "body", "message": message}],
        headers={"connection": "close", **headers},
        **error_body(detail, INVALID, code=code, param="body"),
    )


class HeadMiddleware:
    """``HEAD`` wherever there is ``GET``: the same answer without its body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask for the whole, send its head, and be gone."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        sent = False

        async def leaving() -> Message:
            return {"type": "http.disconnect"} if sent else await receive()

        async def heading(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                await send(message)
                sent = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self.app({**scope, "method": "GET"}, leaving, heading)


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
