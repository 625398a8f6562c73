"""Carry the calls of a program out on a real directory, and look at one: a plain directory or a mount alike."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.support import calls
from tests.support.calls import Call, content
from tests.support.reference import Facts, Snapshot

READ_BYTES = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100


def perform(root: Path, call: Call) -> int:
    """Make the system calls of *call* below *root*; returns 0 or the errno. Markers are not for this function."""
    try:
        _ACTIONS[type(call)](os.fsencode(root) + b"/", call)
    except OSError as error:
        return int(error.errno or errno.EIO)
    return 0


def observe(root: Path) -> Snapshot:
    """Look at everything below *root*, without leaving a trace in access times (O_NOATIME, for what can be opened)."""
    with _opened(os.fsencode(root)) as fd:
        found = dict(_observe_directory(fd, b""))
    first: dict[int | None, bytes] = {}
    for path in sorted(found):
        first.setdefault(found[path].ino, path)
    return {path: replace(facts, same_as=first[facts.ino]) for path, facts in found.items()}


def without_ino(snapshot: Snapshot) -> Snapshot:
    """For comparing two directories that need not give the same inode numbers."""
    return {path: replace(facts, ino=None) for path, facts in snapshot.items()}


def _observe_directory(fd: int, path: bytes) -> Iterator[tuple[bytes, Facts]]:
    yield path, _facts(os.fstat(fd), _xattrs(fd))
    prefix = path + b"/" if path else b""
    # Held through /proc, since a path may be longer than PATH_MAX.
    here = b"/proc/self/fd/%d/" % fd
    for name in sorted(map(os.fsencode, os.listdir(fd))):
        status = os.lstat(name, dir_fd=fd)
        if stat.S_ISDIR(status.st_mode):
            with _opened(name, fd) as child:
                yield from _observe_directory(child, prefix + name)
        elif stat.S_ISREG(status.st_mode):
            with _opened(name, fd) as child:
                yield prefix + name, replace(_facts(status, _xattrs(child)), content=_read_all(child))
        else:
            target = os.readlink(name, dir_fd=fd) if stat.S_ISLNK(status.st_mode) else b""
            facts = _facts(status, _xattrs(here + name))
            yield prefix + name, replace(facts, target=target, atime_ns=None if target else facts.atime_ns)


@contextmanager
def _opened(name: bytes, dir_fd: int | None = None) -> Iterator[int]:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOATIME, dir_fd=dir_fd)
    except PermissionError:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_all(fd: int) -> bytes:
    return b"".join(iter(lambda: os.read(fd, READ_BYTES), b""))


def _xattrs(target: int | bytes) -> tuple[tuple[bytes, bytes], ...]:
    follow = isinstance(target, int)
    names = sorted(map(os.fsencode, os.listxattr(target, follow_symlinks=follow)))
    return tuple((name, os.getxattr(target, name, follow_symlinks=follow)) for name in names)


def _facts(status: os.stat_result, xattrs: tuple[tuple[bytes, bytes], ...]) -> Facts:
    is_device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
    return Facts(
        mode=status.st_mode,
        nlink=status.st_nlink,
        uid=status.st_uid,
        gid=status.st_gid,
        size=0 if stat.S_ISDIR(status.st_mode) else status.st_size,
        target=b"",
        rdev=status.st_rdev if is_device else 0,
        same_as=b"",
        xattrs=xattrs,
        atime_ns=status.st_atime_ns,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        content=None,
        ino=status.st_ino,
    )


def rename2(source: bytes, target: bytes, flags: int) -> None:
    """renameat2(2), which Python does not have."""
    if _libc.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source)


def _write_all(fd: int, data: bytes, offset: int | None = None) -> None:
    done = 0
    while done < len(data):
        if offset is None:
            done += os.write(fd, data[done:])
        else:
            done += os.pwrite(fd, data[done:], offset + done)


@contextmanager
def _writing(path: bytes, flags: int = 0, mode: int = 0) -> Iterator[int]:
    if not flags & os.O_EXCL and os.path.lexists(path) and calls.kind_of(os.lstat(path).st_mode) == calls.OTHERS:
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def _create(root: bytes, call: calls.Create) -> None:
    with _writing(root + call.path, os.O_CREAT | os.O_EXCL, call.mode):
        pass


def _write(root: bytes, call: calls.Write) -> None:
    with _writing(root + call.path) as fd:
        _write_all(fd, content(call.seed, call.length), call.offset)


def _append(root: bytes, call: calls.Append) -> None:
    with _writing(root + call.path, os.O_APPEND) as fd:
        _write_all(fd, content(call.seed, call.length))


def _save(root: bytes, call: calls.Save) -> None:
    with _writing(root + call.path, os.O_CREAT | os.O_TRUNC, call.mode) as fd:
        _write_all(fd, content(call.seed, call.length))


def _truncate(root: bytes, call: calls.Truncate) -> None:
    with _writing(root + call.path) as fd:
        os.ftruncate(fd, call.size)


def _write_unlinked(root: bytes, call: calls.WriteUnlinked) -> None:
    data = content(call.seed, call.length)
    fd = os.open(root + call.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NOATIME)
    try:
        os.unlink(root + call.path)
        _write_all(fd, data, 0)
        back = b""
        while len(back) < len(data) and (piece := os.pread(fd, len(data) - len(back), len(back))):
            back += piece
        assert back == data, "an unlinked file gave back other bytes than were written"
    finally:
        os.close(fd)


def _fsync(root: bytes, call: calls.Fsync) -> None:
    fd = os.open(root + call.path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename(root: bytes, call: calls.Rename) -> None:
    if call.flags:
        rename2(root + call.source, root + call.path, call.flags)
    else:
        os.rename(root + call.source, root + call.path)


_ACTIONS: dict[type, Callable[[bytes, Call], None]] = {
    calls.Mkdir: lambda root, call: os.mkdir(root + call.path, call.mode),
    calls.Create: _create,
    calls.Mknod: lambda root, call: os.mknod(root + call.path, call.mode, call.rdev),
    calls.Symlink: lambda root, call: os.symlink(call.target, root + call.path),
    calls.Link: lambda root, call: os.link(root + call.source, root + call.path, follow_symlinks=False),
    calls.Unlink: lambda root, call: os.unlink(root + call.path),
    calls.Rmdir: lambda root, call: os.rmdir(root + call.path),
    calls.Rename: _rename,
    calls.Write: _write,
    calls.Append: _append,
    calls.Save: _save,
    calls.Truncate: _truncate,
    calls.Chmod: lambda root, call: os.chmod(root + call.path, call.mode),
    calls.Chown: lambda root, call: os.chown(root + call.path, call.uid, call.gid, follow_symlinks=False),
    calls.Utimens: lambda root, call: os.utime(
        root + call.path, ns=(call.atime_ns, call.mtime_ns), follow_symlinks=False
    ),
    calls.SetXattr: lambda root, call: os.setxattr(
        root + call.path, call.name, call.value, call.flags, follow_symlinks=False
    ),
    calls.RemoveXattr: lambda root, call: os.removexattr(root + call.path, call.name, follow_symlinks=False),
    calls.WriteUnlinked: _write_unlinked,
    calls.Fsync: _fsync,
}  # fmt: skip
