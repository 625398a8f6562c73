"""The network between a node and its store: a loopback proxy that can be slow, or cut, or lead to a restarted server.

Invariant: it forwards bytes unread, so the server's protocol and the client's signatures stay what they are.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK_BYTES = 1 << 16


class Link:
    """Listens on a port of its own for as long as the test; `target` may change, or be None: cut."""

    def __init__(self, target: str | None) -> None:
        self.target = target
        self.upload_bytes_per_s: float | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Let nothing through any more, and break what is under way."""
        self.target = None
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def mend(self, target: str) -> None:
        """Lead to *target* from now on."""
        self.target = target

    def close(self) -> None:
        self.cut()
        # Closing alone does not wake a thread that waits in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        target = self.target
        if target is None:
            client.close()
            return
        host, _, port = target.removeprefix("http://").partition(":")
        try:
            server = socket.create_connection((host, int(port)), timeout=10)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        with self._lock:
            self._open |= {client, server}
        back = threading.Thread(target=self._pump, args=(server, client, False), daemon=True)
        back.start()
        self._pump(client, server, True)
        back.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _pump(self, source: socket.socket, target: socket.socket, upload: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                target.sendall(data)
                if upload and self.upload_bytes_per_s:
                    time.sleep(len(data) / self.upload_bytes_per_s)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def link_to(target: str | None) -> Iterator[Link]:
    link = Link(target)
    try:
        yield link
    finally:
        link.close()
