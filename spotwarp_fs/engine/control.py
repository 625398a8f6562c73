"""The daemon's control socket: one line of JSON in, progress lines and one answer out.

Invariant: a request never stops the daemon, whatever it says; an operation that takes long sends progress at least
every `PROGRESS_PERIOD_S`. Only the owner of the socket's directory can connect.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import trio

from spotwarp_fs.core.errors import ExitCode, SpotwarpError, UserError
from spotwarp_fs.engine.groups import only_cause

log = logging.getLogger(__name__)

PROGRESS_PERIOD_S: Final = 0.5
REQUEST_BYTES_MAX: Final = 1 << 20
CONNECTIONS_MAX: Final = 64

Operation = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
Progress = Callable[[], dict[str, Any]]


class ControlServer:
    """Serves named operations on a unix socket."""

    def __init__(self, path: str, operations: Mapping[str, Operation], progress: Progress) -> None:
        self._path = path
        self._operations = operations
        self._progress = progress
        self._slots = trio.CapacityLimiter(CONNECTIONS_MAX)
        self.on_answered: Callable[[str], None] = lambda name: None
        """Told after each successful answer was sent, for what must not come before it."""

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled; a socket left behind by a killed daemon is replaced."""
        draft = f"{self._path}.new"
        _remove(draft)
        listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        with listener:
            await listener.bind(draft)
            os.chmod(draft, 0o600)
            listener.listen(CONNECTIONS_MAX)
            os.replace(draft, self._path)
            task_status.started()
            async with trio.open_nursery() as nursery:
                while True:
                    try:
                        connection, _ = await listener.accept()
                    except OSError as error:  # out of descriptors for a moment: no reason to end the mount
                        log.warning("control connection not accepted reason=%s", error)
                        await trio.sleep(PROGRESS_PERIOD_S)
                        continue
                    nursery.start_soon(self._serve, trio.SocketStream(connection))

    async def _serve(self, stream: trio.SocketStream) -> None:
        async with self._slots, stream:
            try:
                request = await _read_line(stream)
                if request is not None:
                    await self._answer(stream, request)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the caller went away

    async def _answer(self, stream: trio.SocketStream, line: bytes) -> None:
        name = ""
        try:
            name, operation, request = self._parse(line)
            answer = {"ok": True, "result": await self._with_progress(stream, operation, request)}
        except Exception as error:  # an edge: whatever a request meets, the daemon goes on and the caller hears of it
            cause = only_cause(error)
            if isinstance(cause, trio.BrokenResourceError | trio.ClosedResourceError):
                raise cause from None
            if not isinstance(cause, SpotwarpError):
                log.exception("control request failed op=%s", name)
                cause = SpotwarpError(f"{type(cause).__name__}: {cause}")
            answer = _failure(cause)
        await stream.send_all(json.dumps(answer).encode() + b"\n")
        if answer["ok"]:
            self.on_answered(name)

    def _parse(self, line: bytes) -> tuple[str, Operation, Mapping[str, Any]]:
        try:
            request = json.loads(line)
        except ValueError as error:
            raise UserError(f"the request is not a line of JSON: {error}") from error
        name = str(request.get("op")) if isinstance(request, dict) else ""
        operation = self._operations.get(name)
        if operation is None:
            raise UserError(f"this daemon has no operation {name!r}; it has {', '.join(sorted(self._operations))}")
        return name, operation, request

    async def _with_progress(
        self, stream: trio.SocketStream, operation: Operation, request: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Run *operation*, telling the caller meanwhile how far things are."""

        async def tell() -> None:
            while True:
                await trio.sleep(PROGRESS_PERIOD_S)
                await stream.send_all(json.dumps({"progress": self._progress()}).encode() + b"\n")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell)
            result = await operation(request)
            nursery.cancel_scope.cancel()
        return result


async def _read_line(stream: trio.SocketStream) -> bytes | None:
    received = bytearray()
    while b"\n" not in received:
        chunk = await stream.receive_some(1 << 16)
        if not chunk or len(received) > REQUEST_BYTES_MAX:
            return None
        received += chunk
    return bytes(received[: received.index(b"\n")])


def _failure(error: SpotwarpError) -> dict[str, Any]:
    code = getattr(error, "exit_code", ExitCode.FAILED)
    return {"ok": False, "error": {"kind": type(error).__name__, "message": str(error), "exit_code": int(code)}}


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
