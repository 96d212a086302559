"""Running the API in this process."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from types import FrameType

import uvicorn

from omniq.config import available_pipelines
from omniq.settings import get_settings
from omniq_api.app import create_app
from omniq_api.http_protocol import GuardedProtocol

GRACE = 2
GC_THRESHOLDS = (20_000, 20, 50)
KEEP_ALIVE = 65
"""Above the usual 60 s of load balancers and client pools, so that they close first."""


class _Server(uvicorn.Server):
    """Tells the app as soon as it begins to stop."""

    def __init__(self, config: uvicorn.Config, stopping: asyncio.Event) -> None:
        super().__init__(config)
        self._stopping = stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wake streams and long polls, then stop as uvicorn does."""
        self._stopping.set()
        await super().shutdown(sockets)


def _calm_collector() -> None:
    """Keep the garbage collector from stopping all requests for tens of milliseconds at a time.

    What is there by now stays, so it need not be looked at again. A waiting client is some hundred
    objects that stay for long, and Python's own thresholds, made for small programs, have it look
    through all of them several times a second; requests leave hardly any cycles behind.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def run_api(host: str, port: int, *, access_log: bool = False) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status, 0 after a graceful stop.

    Stopping takes less than ``GRACE`` + 1 seconds: event streams and long polls end at once (their
    clients go on at another replica or after the restart), other requests get ``GRACE`` seconds.

    Raises:
        ConfigError: a pipeline file is wrong.
    """
    settings = get_settings()
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # It warns of every malformed form; its sender is told by the answer.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    available_pipelines()
    app = create_app()
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=GuardedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=access_log,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
    )
    server = _Server(config, app.state.stopping)

    def stop(number: int, frame: FrameType | None) -> None:
        # Before uvicorn's own handler is there, and again after it has stopped, when it raises
        # the signal once more.
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    _calm_collector()
    try:
        server.run()
    except SystemExit as exc:  # the port is taken, or the app did not start: logged by uvicorn
        return exc.code if isinstance(exc.code, int) else 1
    return 0
