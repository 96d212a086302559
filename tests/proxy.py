"""A TCP proxy before a real server, which cuts connections, delays answers or speaks TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path
from typing import Any


class Proxy:
    """Passes connections on to ``port`` of this machine.

    Attributes:
        up: bytes after which the next connection to send so many is cut; None: never.
        down: the same for bytes received by the client.
        cuts: so many connections may still be cut.
        hold: what the server answers to the next connection that sends this is kept back until
            ``released`` is set; None: nothing is.
        held: set once an answer is kept back.
        port: where it listens.
    """

    def __init__(self, port: int, certificate: Path | None = None) -> None:
        self.target = port
        self.up: int | None = None
        self.down: int | None = None
        self.cuts = 0
        self.accepted = 0
        self.hold: bytes | None = None
        self.held, self.released = threading.Event(), threading.Event()
        self._held: Any = None
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(certificate)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: Any) -> None:
        server = socket.create_connection(("127.0.0.1", self.target))
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
        except OSError:
            server.close()
            return
        for source, sink, way in ((client, server, "up"), (server, client, "down")):
            threading.Thread(target=self._pump, args=(source, sink, way), daemon=True).start()

    def _pump(self, source: Any, sink: Any, way: str) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                passed += len(data)
                limit = getattr(self, way)
                if limit is not None and passed > limit and self.cuts > 0:
                    self.cuts -= 1
                    break
                if way == "up" and self.hold is not None and self.hold in data:
                    self.hold, self._held = None, source
                if way == "down" and sink is self._held:
                    self.held.set()
                    self.released.wait()
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
