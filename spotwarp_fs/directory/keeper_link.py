"""Find or start the keeper of a directory, and talk to it: requests in turn, events as they come.

Invariant: descriptors that arrive are handed to somebody or closed.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import trio

import spotwarp_fs
from spotwarp_fs.core.errors import Unavailable
from spotwarp_fs.directory import keeper_wire
from spotwarp_fs.directory.keeper_wire import Packet

log = logging.getLogger(__name__)

ANSWER_MAX_S: Final = 10.0
"""A keeper that is silent for longer is killed and replaced: it would not let anybody in in time either."""
JOIN_MAX_S: Final = 20.0
JOIN_AGAIN_S: Final = 0.05
PEER: Final = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid."""


class Lost(Exception):
    """The connection to the keeper ended."""


class Link:
    """One connection to one keeper process."""

    def __init__(self, sock: trio.socket.SocketType, *, may_kill: bool) -> None:
        self._socket = sock
        self.may_kill = may_kill
        """Whether its leases are held here too."""
        self._turn = trio.Lock()
        self._answered, self._answers = trio.open_memory_channel[tuple[Packet, list[int]]](1)
        # As many events as there are descriptors, at most three each; the listener must never wait for their reader.
        self._heard, self.events = trio.open_memory_channel[Packet](math.inf)
        pid, _, _ = PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
        self.pid: Final = int(pid)

    async def verdict(self) -> str:
        """Return the keeper's first word, "welcome" if it takes us; empty if there is none."""
        with trio.move_on_after(ANSWER_MAX_S):
            try:
                packet, _ = keeper_wire.decode(await self._socket.recv(keeper_wire.PACKET_BYTES_MAX), [])
            except OSError:
                return ""
            return str(packet.get("event", ""))
        self.kill()
        return ""

    async def listen(self) -> None:
        """Receive until the keeper hangs up; then no more events and answers come."""
        with self._answered, self._heard:
            while True:
                try:
                    body, ancillary, _, _ = await self._socket.recvmsg(
                        keeper_wire.PACKET_BYTES_MAX, keeper_wire.ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                    )
                except OSError:
                    return
                if not body:
                    return
                packet, fds = keeper_wire.decode(body, ancillary)
                if "event" in packet:
                    self._heard.send_nowait(packet)
                    continue
                try:
                    self._answered.send_nowait((packet, fds))
                except trio.WouldBlock:
                    keeper_wire.close_all(fds)  # an answer that nobody waits for
                    return

    async def ask(self, request: Packet, fds: Sequence[int] = ()) -> tuple[Packet, list[int]]:
        """Send *request* and return its answer, whatever is cancelled meanwhile; raise Lost if the keeper is gone."""
        with trio.CancelScope(shield=True):
            async with self._turn:
                with trio.move_on_after(ANSWER_MAX_S):
                    try:
                        await self._socket.sendmsg([keeper_wire.encode(request)], keeper_wire.beside(fds))
                        return await self._answers.receive()
                    except (OSError, trio.EndOfChannel, trio.ClosedResourceError) as error:
                        raise Lost(str(error) or type(error).__name__) from error
                self.kill()
        raise Lost(f"no answer to {request['op']} within {ANSWER_MAX_S} s")

    def kill(self) -> None:
        """End a keeper that does not answer: a lease is worth nothing if its holder sleeps."""
        if not self.may_kill:
            return
        log.error("keeper killed pid=%d reason=no answer within %s s", self.pid, ANSWER_MAX_S)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Hang up; the keeper goes on."""
        self._socket.close()


async def join(socket_path: Path, log_path: Path, options: tuple[str, ...], *, may_kill: bool) -> Link:
    """Connect to the keeper at *socket_path*, started if there is none, or raise Unavailable.

    One that says nothing is killed if *may_kill*: its leases must be held here too.
    """
    said = ""
    end_s = trio.current_time() + JOIN_MAX_S
    while trio.current_time() < end_s:
        sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with keeper_wire.reachable(socket_path) as address:
                await sock.connect(address)
        except (FileNotFoundError, ConnectionError):
            sock.close()
            await _start(socket_path, log_path, options)
            continue
        link = Link(sock, may_kill=may_kill)
        said = await link.verdict()
        if said == "welcome":
            return link
        link.close()
        await trio.sleep(JOIN_AGAIN_S)
    raise Unavailable(
        f"the keeper at {socket_path} did not take this daemon within {JOIN_MAX_S:.0f} s (it said "
        f"{said or 'nothing'!r}; busy means that another daemon is connected to it); see {log_path}"
    )


async def _start(socket_path: Path, log_path: Path, options: tuple[str, ...]) -> None:
    """Run the starter of a keeper, which ends when the keeper listens, or raise Unavailable with what it said."""
    command = [sys.executable, "-m", "spotwarp_fs.directory.keeper", str(socket_path.absolute())]
    command += [str(log_path.absolute()), *options]
    # Started beside the package, so that no module of the user's working directory is imported by accident.
    home = Path(spotwarp_fs.__file__).parent.parent
    done = await trio.run_process(
        command, cwd=home, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, capture_stderr=True, check=False
    )
    if done.returncode != 0:
        await trio.sleep(JOIN_AGAIN_S)
    if done.returncode not in (0, keeper_wire.EXIT_RUNNING):
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise Unavailable(f"no keeper could be started at {socket_path} (exit code {done.returncode}): {said}")
