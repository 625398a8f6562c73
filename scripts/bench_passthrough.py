"""Bare pyfuse3 pass-through: the fixed denominator of the bench. Not a filesystem to use.

A copy, unchanged in behaviour, of the probe that the project's targets are stated against: whoever edits it changes
what every ratio means.

One flat directory; each file is a plain file named by inode number in BACKING. Everything runs inline on the event
loop, metadata lives in a dict, nothing is persisted: what remains is the cost of the kernel, pyfuse3 and trio.

    python bench_passthrough.py MOUNTPOINT BACKING          # WRITEBACK=1 turns the kernel's writeback cache on
"""

import errno
import os
import stat
import sys
import time

import pyfuse3
import trio

TIMEOUT_S = 3600
READAHEAD_KB = 4096


class Passthrough(pyfuse3.Operations):
    enable_writeback_cache = os.environ.get("WRITEBACK") == "1"

    def __init__(self, backing: str) -> None:
        super().__init__()
        self.backing = backing
        self.names: dict[bytes, int] = {}
        self.fds: dict[int, int] = {}
        self.attributes = {pyfuse3.ROOT_INODE: self._attributes(pyfuse3.ROOT_INODE, stat.S_IFDIR | 0o755)}
        self.next_inode = 2

    @staticmethod
    def _attributes(inode: int, mode: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.st_mode, entry.st_nlink = inode, mode, 1
        entry.entry_timeout = entry.attr_timeout = TIMEOUT_S
        entry.st_blksize, entry.st_size, entry.st_blocks = 1 << 20, 0, 0
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = time.time_ns()
        return entry

    async def getattr(self, inode, ctx=None):
        return self.attributes[inode]

    async def lookup(self, parent, name, ctx=None):
        if name not in self.names:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self.attributes[self.names[name]]

    async def create(self, parent, name, mode, flags, ctx):
        inode, self.next_inode = self.next_inode, self.next_inode + 1
        self.names[name] = inode
        self.fds[inode] = os.open(os.path.join(self.backing, str(inode)), os.O_RDWR | os.O_CREAT)
        self.attributes[inode] = self._attributes(inode, mode)
        return pyfuse3.FileInfo(fh=inode, keep_cache=True), self.attributes[inode]

    async def open(self, inode, flags, ctx):
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def opendir(self, inode, ctx):
        return inode

    async def readdir(self, inode, start, token):
        for position, (name, child) in enumerate(list(self.names.items())[start:], start + 1):
            if not pyfuse3.readdir_reply(token, name, self.attributes[child], position):
                break

    async def read(self, inode, offset, size):
        return os.pread(self.fds[inode], size, offset)

    async def write(self, inode, offset, data):
        written = os.pwrite(self.fds[inode], data, offset)
        entry = self.attributes[inode]
        entry.st_size = max(entry.st_size, offset + written)
        return written

    async def setattr(self, inode, wanted, fields, inode_open, ctx):
        entry = self.attributes[inode]
        if fields.update_size:
            os.ftruncate(self.fds[inode], wanted.st_size)
            entry.st_size = wanted.st_size
        if fields.update_mode:
            entry.st_mode = wanted.st_mode
        if fields.update_mtime:
            entry.st_mtime_ns = wanted.st_mtime_ns
        return entry

    async def unlink(self, parent, name, ctx):
        inode = self.names.pop(name)
        os.close(self.fds.pop(inode))
        os.unlink(os.path.join(self.backing, str(inode)))

    async def rename(self, parent, name, parent_new, name_new, flags, ctx):
        self.names[name_new] = self.names.pop(name)

    async def fsync(self, inode, datasync):
        os.fdatasync(self.fds[inode])

    async def getxattr(self, inode, name, ctx):
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def flush(self, inode):
        pass

    async def release(self, inode):
        pass

    async def forget(self, inodes):
        pass

    async def statfs(self, ctx):
        figures = pyfuse3.StatvfsData()
        figures.f_bsize = figures.f_frsize = 4096
        figures.f_blocks = figures.f_bfree = figures.f_bavail = 1 << 28
        figures.f_files = figures.f_ffree = 1 << 20
        figures.f_namemax = 255
        return figures


async def raise_readahead(mountpoint: str) -> None:
    await trio.sleep(0.2)
    device = (await trio.to_thread.run_sync(os.stat, mountpoint)).st_dev
    with open(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb", "w") as setting:
        setting.write(str(READAHEAD_KB))


async def serve(mountpoint: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(raise_readahead, mountpoint)
        await pyfuse3.main()


if __name__ == "__main__":
    pyfuse3.init(
        Passthrough(sys.argv[2]), sys.argv[1], set(pyfuse3.default_options) | {"fsname=passthrough", "allow_other"}
    )
    try:
        trio.run(serve, sys.argv[1])
    finally:
        pyfuse3.close()
