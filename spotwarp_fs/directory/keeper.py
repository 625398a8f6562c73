"""The keeper: a small process that holds the write leases of placeholders and outlives the daemon that fills them.

    python -m spotwarp_fs.directory.keeper SOCKET LOG [--late-after S] [--idle S]

It answers one daemon at a time (`keeper_wire`), tells it which placeholders somebody waits for, and lets a file go when
the daemon says that it is filled. Bytes that do not come in time, from whatever daemon, make it mark the file *late*,
empty it and let go, before the kernel would open it as it is.

Invariant: a lease belongs to the open file description, of which the daemon keeps a duplicate: either may die, and
openers keep waiting until the other has found a successor.
It ends when nothing is held and no daemon has been connected for a while; SIGTERM ends it only if nothing is held.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from spotwarp_fs.directory import keeper_wire, leases
from spotwarp_fs.directory.keeper_files import BREAK_SIGNAL, Leases, late_limit_s
from spotwarp_fs.directory.keeper_wire import FILES_PER_PACKET, Packet

log = logging.getLogger("keeper")

IDLE_S: Final = 10.0
POLL_S: Final = 5.0
"""Every lease is looked at this often, in case a signal was lost."""
ANSWER_S: Final = 5
"""A daemon that does not take what it is told for so long is taken for dead; it may connect anew."""
LOG_BYTES_MAX: Final = 1 << 20
SIGNALS: Final = (BREAK_SIGNAL, signal.SIGIO, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGINFO: Final = struct.Struct("=IiiIIi104x")
"""`struct signalfd_siginfo` up to ssi_fd: signo, errno, code, pid, uid, fd."""
NFDBITS_BYTES: Final = 128
LISTENING: Final = b"L"
RUNNING: Final = b"R"


class Keeper:
    """The process: one daemon, the signals of the leases, and the clock."""

    def __init__(self, listener: socket.socket, signals: int, held: Leases, idle_s: float) -> None:
        self._listener = listener
        self._signals = signals
        self._held = held
        self._idle_s = idle_s
        self._daemon: socket.socket | None = None
        self._handing: list[int] = []
        self._alone_since_s = time.monotonic()
        self._polled_s = time.monotonic()
        self._ended = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(signals, selectors.EVENT_READ, self._on_signals)

    def run(self) -> None:
        """Keep until there is nothing left to do."""
        while not self._ended:
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            now = time.monotonic()
            if now >= self._polled_s + POLL_S:
                self._polled_s = now
                self._tell("wanted", self._held.broken(None))
            self._tell("stop", self._held.to_stop(now))
            self._give_up(self._held.overdue(now))
            if self._daemon is None and not self._held.files and now >= self._alone_since_s + self._idle_s:
                self._ended = True

    def _timeout_s(self) -> float:
        now = time.monotonic()
        due = self._held.next_deadline()
        wait = POLL_S if self._held.files else self._idle_s
        return max(0.0, min(wait, due - now if due is not None else wait))

    def _accept(self) -> None:
        with suppress(OSError):
            daemon, _ = self._listener.accept()
            daemon.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", ANSWER_S, 0))
            if self._daemon is not None and not _hung_up(self._daemon):
                with daemon, suppress(OSError):
                    daemon.send(keeper_wire.encode({"event": "busy", "files": []}), socket.MSG_DONTWAIT)
                return
            self._part()
            self._daemon = daemon
            self._selector.register(daemon, selectors.EVENT_READ, self._on_request)
            log.info("joined held=%d", len(self._held.files))
            self._send({"event": "welcome", "files": []})

    def _part(self) -> None:
        if self._daemon is None:
            return
        self._selector.unregister(self._daemon)
        self._daemon.close()
        self._daemon = None
        self._alone_since_s = time.monotonic()
        log.info("alone held=%d", len(self._held.files))

    def _on_signals(self) -> None:
        data = os.read(self._signals, SIGINFO.size * 64)
        wanted: dict[int, None] = {}
        for number, _, _, _, _, fd in SIGINFO.iter_unpack(data):
            if number in (BREAK_SIGNAL, signal.SIGIO):
                # SIGIO instead of ours: the queue of signals was full, so it could be any of them.
                wanted.update(dict.fromkeys(self._held.broken(fd if number == BREAK_SIGNAL else None)))
            elif self._held.files:
                log.warning("not ending signal=%d held=%d", number, len(self._held.files))
            else:
                self._ended = True
        self._tell("wanted", list(wanted))

    def _give_up(self, idents: list[int]) -> None:
        late = [ident for ident in idents if self._held.give_up(ident)]
        for ident in late:
            log.warning("late ident=%d after_s=%s", ident, self._held.late_after_s)
        self._tell("late", late)

    def _tell(self, event: str, idents: list[int]) -> None:
        for start in range(0, len(idents), FILES_PER_PACKET):
            self._send({"event": event, "files": idents[start : start + FILES_PER_PACKET]})

    def _send(self, packet: Packet, fds: list[int] | None = None) -> None:
        if self._daemon is None:
            return
        try:
            self._daemon.sendmsg([keeper_wire.encode(packet)], keeper_wire.beside(fds or []))
        except OSError as error:
            log.warning("daemon does not listen error=%s", error)
            self._part()

    def _on_request(self) -> None:
        assert self._daemon is not None
        try:
            body, ancillary, flags, _ = self._daemon.recvmsg(
                keeper_wire.PACKET_BYTES_MAX, keeper_wire.ANCILLARY_BYTES, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            body, ancillary, flags = b"", [], 0
        if not body:
            self._part()
            return
        request, fds = keeper_wire.decode(body, ancillary)
        if flags & socket.MSG_CTRUNC or (request.get("op") == "hold" and len(fds) != len(request["files"])):
            log.error("refused op=%s descriptors=%d", request.get("op"), len(fds))
            keeper_wire.close_all(fds)
            request, fds = request | {"files": []}, []
        try:
            self._answer(request, fds)
        except (LookupError, TypeError, ValueError) as error:
            # Whoever it is that speaks otherwise: what is held stays held.
            log.error("not understood request=%.200s error=%r", request, error)
            self._part()

    def _answer(self, request: Packet, fds: list[int]) -> None:
        match request.get("op"):
            case "join":
                self._handing = list(self._held.files)
                late = list(self._held.late)[-FILES_PER_PACKET:]
                self._held.ask_again()
                self._reply("join", files=late)
                self._tell("wanted", self._held.waited_for)
            case "take":
                self._hand_over()
            case "hold":
                wishes = zip(request["files"], fds, strict=True)
                held = [ident for (ident, waited_s), fd in wishes if self._held.add(ident, fd, waited_s)]
                self._reply("hold", files=held)
                self._tell("wanted", [ident for ident in held if self._held.files[ident].broke_s is not None])
            case "release":
                for ident in request["files"]:
                    self._release(ident)
                self._reply("release")
            case "stopped":
                self._reply("stopped")
                self._give_up(request["files"])
            case "end":
                self._ended = not self._held.files
                self._reply("end", ended=self._ended)
            case other:
                self._reply(str(other))

    def _reply(self, op: str, **more: object) -> None:
        self._send({"re": op, "room": self._held.room, **more})

    def _release(self, ident: int) -> None:
        held = self._held.files.get(ident)
        if held is None:
            return
        try:
            leases.clear_mark(held.fd)
        except OSError as error:
            log.error("still held ident=%d error=%s", ident, error)
            return
        self._held.let_go(ident)

    def _hand_over(self) -> None:
        """Give the daemon the next of those that were held when it joined."""
        batch = [ident for ident in self._handing[:FILES_PER_PACKET] if ident in self._held.files]
        self._handing = self._handing[FILES_PER_PACKET:]
        fds = [self._held.files[ident].fd for ident in batch]
        self._send({"re": "take", "room": self._held.room, "files": batch, "more": bool(self._handing)}, fds)


def _hung_up(daemon: socket.socket) -> bool:
    try:
        return not daemon.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def signal_descriptor() -> int:
    """Return a descriptor that reads as the signals of this process, which no longer interrupt it (`signalfd`)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    mask = bytearray(NFDBITS_BYTES)
    for number in SIGNALS:
        mask[(number - 1) // 8] |= 1 << (number - 1) % 8
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.signalfd(-1, (ctypes.c_char * len(mask)).from_buffer(mask), os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "signalfd")
    return int(fd)


def listen(path: Path) -> socket.socket | None:
    """Listen at *path*, or return None if a keeper does already; what a killed one left there is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with keeper_wire.reachable(path) as address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            try:
                other.connect(address)
                return None
            except (FileNotFoundError, ConnectionRefusedError):
                path.unlink(missing_ok=True)
        listener.bind(address)
    listener.listen(8)
    return listener


def detach(log_path: Path) -> int:
    """Go on in a process of a session of its own, with nothing left of the starter's; return where to say how it went.

    The starter ends with 0 when it hears that the keeper listens. The listening is the child's, also in SO_PEERCRED.
    """
    heard, told = os.pipe()
    if os.fork():
        os.close(told)
        codes = {LISTENING: 0, RUNNING: keeper_wire.EXIT_RUNNING}
        os._exit(codes.get(os.read(heard, 1), 1))
    os.close(heard)
    os.setsid()
    os.chdir("/")
    if log_path.exists() and log_path.stat().st_size > LOG_BYTES_MAX:
        log_path.unlink()
    output = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    keeper_wire.close_all((null, output))
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    return told


def main(argv: list[str]) -> int:
    """Keep; the process that was called returns as soon as another one listens."""
    parser = argparse.ArgumentParser(prog="spotwarp_fs.directory.keeper")
    parser.add_argument("socket", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--late-after", type=float, default=late_limit_s(leases.lease_break_time_s()))
    parser.add_argument("--idle", type=float, default=IDLE_S)
    options = parser.parse_args(argv)
    os.umask(0o077)
    path: Path = options.socket.absolute()
    told = detach(options.log.absolute())
    signals = signal_descriptor()
    listener = listen(path)
    if listener is None:
        os.write(told, RUNNING)
        return keeper_wire.EXIT_RUNNING
    mine = path.stat().st_ino
    os.write(told, LISTENING)
    os.close(told)
    held = Leases(options.late_after)
    log.info("keeping pid=%d room=%d late_after_s=%s", os.getpid(), held.room, held.late_after_s)
    Keeper(listener, signals, held, options.idle).run()
    with suppress(OSError):
        if path.stat().st_ino == mine:
            path.unlink()
    log.info("ended")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
