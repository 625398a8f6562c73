"""HTTP/1.1 over loopback: h11 on trio, because faults need the bytes in their own hands.

An answer can be cut off, dribble, or come after minutes; a server framework would put its own handling of those in
between (docs/decisions/simulator-server.md).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable

import h11
import trio

from provisioner.simulator.clock import SimClock
from provisioner.simulator.wire import Reply, Request

RECEIVE_BYTES = 65_536
BODY_BYTES_MAX = 8 << 20
DRIBBLE_PIECES = 10

Answer = Callable[[Request], Awaitable[Reply]]


class Server:
    """Serve one answering function to any number of connections."""

    def __init__(self, answer: Answer, clock: SimClock) -> None:
        self._answer = answer
        self._clock = clock

    async def connection(self, stream: trio.SocketStream) -> None:
        """Serve one connection until either side ends it."""
        try:
            async with stream:
                http = h11.Connection(h11.SERVER)
                while await self._one(http, stream):
                    http.start_next_cycle()
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            return  # the client has gone; what it asked for has happened all the same

    async def _one(self, http: h11.Connection, stream: trio.SocketStream) -> bool:
        """Serve one request; return whether another may follow on this connection."""
        request = await _receive(http, stream)
        if request is None:
            return False
        reply = await self._answer(request)
        if reply.dropped:
            _cut(stream)
            return False
        head = [(name, value) for name, value in reply.headers.items()]
        if reply.status != 204:
            head.append(("Content-Length", str(len(reply.body))))
        await _send(http, stream, h11.Response(status_code=reply.status, headers=head))
        pieces = DRIBBLE_PIECES if reply.dribble_s else 1
        size = max(1, -(-len(reply.body) // pieces))
        for start in range(0, len(reply.body), size):
            if reply.dribble_s:
                await self._clock.sleep(reply.dribble_s / pieces)
            await _send(http, stream, h11.Data(data=reply.body[start : start + size]))
        await _send(http, stream, h11.EndOfMessage())
        return http.our_state is h11.DONE and http.their_state is h11.DONE


async def _receive(http: h11.Connection, stream: trio.SocketStream) -> Request | None:
    """Read one request, or return None when the client has ended the connection."""
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            if http.they_are_waiting_for_100_continue:
                await _send(http, stream, h11.InformationalResponse(status_code=100, headers=[]))
            http.receive_data(await stream.receive_some(RECEIVE_BYTES))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > BODY_BYTES_MAX:
                return None
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None, "h11 ends a message only after its head"
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
            return Request.parse(head.method.decode(), head.target.decode("latin-1"), headers, bytes(body))
        else:
            return None


async def _send(http: h11.Connection, stream: trio.SocketStream, event: h11.Event) -> None:
    data = http.send(event)
    if data:
        await stream.send_all(data)


def _cut(stream: trio.SocketStream) -> None:
    """Make closing send a reset: the client must see a broken connection, not a polite end."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
