"""An httpx transport into a simulator in the same process: no socket, so trio's mock clock can run the whole world.

What a client may experience is the same as over loopback: a cut connection, an answer after its patience is over. A
request that has been sent goes on by itself when the client stops waiting, as it would on a real server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import httpx
import trio

from provisioner.simulator.clock import SimClock
from provisioner.simulator.wire import Reply, Request


class InProcessTransport(httpx.AsyncBaseTransport):
    """Hand requests to an answering function whose work continues in *nursery*."""

    def __init__(self, answer: Callable[[Request], Awaitable[Reply]], clock: SimClock, nursery: trio.Nursery) -> None:
        self._answer = answer
        self._clock = clock
        self._nursery = nursery

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer one request, or raise what httpx raises over a network."""
        body = await request.aread()
        target = request.url.raw_path.decode("ascii")
        asked = Request.parse(request.method, target, dict(request.headers), body)
        sender, receiver = trio.open_memory_channel[Reply](1)

        async def work() -> None:
            await sender.send(await self._answer(asked))

        self._nursery.start_soon(work)
        timeout = request.extensions.get("timeout", {}).get("read")
        with trio.move_on_after(float("inf") if timeout is None else timeout) as patience:
            reply = await receiver.receive()
        if patience.cancelled_caught:
            raise httpx.ReadTimeout(f"{request.url} did not answer within {timeout} s", request=request)
        if reply.dropped:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.", request=request)
        await self._clock.sleep(reply.dribble_s)
        return httpx.Response(reply.status, headers=dict(reply.headers), content=reply.body, request=request)
