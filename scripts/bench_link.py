"""The way between a system and the store: a loopback proxy that adds latency, limits uploads and counts bytes.

It runs in a process of its own, so that the bench's interpreter is not in the way. Invariant: it forwards bytes as they
are, and waits once per request: on the first bytes that a client sends after an answer (or at all).
"""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

CHUNK_BYTES = 256 << 10
BACKLOG = 128
HALF_WAY = b"HTTP/1.1 100"
"""The answer after which the body of the same request follows."""
NOT_COUNTED_BYTES = 4 << 10
"""A request without a body: it is not worth a turn in the queue of a limited link."""


@dataclass(frozen=True)
class Link:
    """A running proxy."""

    endpoint: str
    _requests: object
    _up: object
    _down: object

    @property
    def requests(self) -> int:
        """Requests so far."""
        return self._requests.value  # type: ignore[attr-defined]

    @property
    def up_bytes(self) -> int:
        """Bytes that clients sent, headers included."""
        return self._up.value  # type: ignore[attr-defined]

    @property
    def down_bytes(self) -> int:
        """Bytes that clients got, headers included."""
        return self._down.value  # type: ignore[attr-defined]


@contextmanager
def link_to(endpoint: str, *, latency_s: float = 0.0, upload_bytes_per_s: float = 0.0) -> Iterator[Link]:
    """Run a proxy to *endpoint* for the length of the block; a rate of 0 is no limit."""
    context = multiprocessing.get_context("fork")
    requests, up, down = (context.Value("q", 0) for _ in range(3))
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    host, _, port = endpoint.removeprefix("http://").partition(":")
    counters = (requests, up, down)
    proxy = _Proxy((host, int(port)), latency_s, upload_bytes_per_s, counters)
    process = context.Process(target=proxy.run, args=(listener, os.getpid()), daemon=True)
    process.start()
    own = listener.getsockname()[1]
    listener.close()
    try:
        yield Link(f"http://127.0.0.1:{own}", *counters)
    finally:
        process.terminate()
        process.join()


class _Proxy:
    """The other process."""

    def __init__(self, target, latency_s, upload_bytes_per_s, counters) -> None:  # type: ignore[no-untyped-def]
        self._target = target
        self._latency_s = latency_s
        self._rate = upload_bytes_per_s
        self._requests, self._up, self._down = counters
        self._free_at_s = 0.0
        self._queue = threading.Lock()

    def run(self, listener: socket.socket, parent: int) -> None:
        """Serve until terminated, or until the bench is gone."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        listener.settimeout(1.0)
        while os.getppid() == parent:
            with suppress(TimeoutError):
                client, _ = listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(None)
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answered = threading.Event()
        answered.set()
        back = threading.Thread(target=self._answers, args=(server, client, answered), daemon=True)
        back.start()
        with suppress(OSError):
            self._requests_of(client, server, answered)
        _end(client, server)
        back.join()
        client.close()
        server.close()

    def _requests_of(self, client: socket.socket, server: socket.socket, answered: threading.Event) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while count := client.recv_into(buffer):
            if answered.is_set():
                answered.clear()
                with self._requests.get_lock():
                    self._requests.value += 1
                time.sleep(self._latency_s)
            if self._rate and count > NOT_COUNTED_BYTES:
                self._wait_for_turn(count)
            with self._up.get_lock():
                self._up.value += count
            server.sendall(buffer[:count])

    def _wait_for_turn(self, count: int) -> None:
        """All uploads share one link."""
        with self._queue:
            self._free_at_s = max(self._free_at_s, time.monotonic()) + count / self._rate
            until_s = self._free_at_s
        time.sleep(max(0.0, until_s - time.monotonic()))

    def _answers(self, server: socket.socket, client: socket.socket, answered: threading.Event) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with suppress(OSError):
            while count := server.recv_into(buffer):
                if bytes(buffer[: len(HALF_WAY)]) != HALF_WAY:
                    answered.set()
                with self._down.get_lock():
                    self._down.value += count
                client.sendall(buffer[:count])
        _end(client, server)


def _end(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
