"""Run the real command line in processes of their own, where FUSE cannot be imported, against workspaces made here.

Nothing is shared with the process under test but the store.
"""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from spotwarp_fs.cli import main
from spotwarp_fs.core.layout import encode_identity, workspace_identity_key
from spotwarp_fs.core.ports import ObjectStore
from spotwarp_fs.core.requests import AttributeChange
from spotwarp_fs.core.types import ROOT_INODE, Inode
from spotwarp_fs.engine.session import Session
from tests.support.world import ACTOR, WORKSPACE_ID, Node, start

RUN = "import sys\nsys.modules['pyfuse3'] = None\nfrom spotwarp_fs.cli.main import main\nmain()"
NAME = "test"
"""The workspace that `tests.support.world.start` serves."""


@dataclass
class CommandLine:
    """`spotwarp`, with a home and a store of its own."""

    home: Path
    store: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def whole_environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPOTWARP_", "AWS_"))}
        return {**kept, "HOME": str(self.home), "SPOTWARP_STORE": self.store, **self.environment}

    def run(self, *arguments: str, text: bool = True) -> subprocess.CompletedProcess[Any]:
        command = [sys.executable, "-c", RUN, *arguments]
        environment = self.whole_environment
        return subprocess.run(command, env=environment, capture_output=True, text=text, timeout=60, check=False)

    def ok(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout)

    def here(self, *arguments: str, code: int = 0) -> str:
        """Run in this process, which is quicker; returns the output, errors included."""
        with pytest.MonkeyPatch.context() as patch:
            for name in set(os.environ) - set(self.whole_environment):
                patch.delenv(name)
            for name, value in self.whole_environment.items():
                patch.setenv(name, value)
            shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
            patch.setattr(sys, "stdout", shown)
            patch.setattr(sys, "stderr", shown)
            found = main.run(list(arguments))
        text = shown.buffer.getvalue().decode()  # type: ignore[attr-defined]
        assert found == code, f"{arguments}: {found}\n{text}"
        return str(text)


async def write(session: Session, path: str, data: bytes, *, at: int = 0, parent: Inode = ROOT_INODE) -> Inode:
    """Make or open a file and write to it."""
    filesystem = session.filesystem
    *directories, name = path.encode().split(b"/")
    for directory in directories:
        parent = (await filesystem.lookup(parent, directory)).ino
    handle, node = await filesystem.create(parent, name, stat.S_IFREG | 0o640, os.O_WRONLY, ACTOR)
    for start_at in range(0, len(data), 1 << 20):
        await filesystem.write(handle, at + start_at, data[start_at : start_at + (1 << 20)])
    await filesystem.release(handle)
    return node.ino


async def mkdir(session: Session, name: str, parent: Inode = ROOT_INODE) -> Inode:
    return (await session.filesystem.mkdir(parent, name.encode(), 0o755, ACTOR)).ino


async def set_times(session: Session, ino: Inode, mtime_ns: int, mode: int | None = None) -> None:
    change = AttributeChange(mode=mode, atime_ns=mtime_ns - 5, mtime_ns=mtime_ns)
    await session.filesystem.setattr(ino, change, None, ACTOR)


def build(store: ObjectStore, *steps: Callable[[Session], Awaitable[None]]) -> list[int]:
    """Publish one state after each step, as a writer that then goes away; returns their numbers."""

    async def main() -> list[int]:
        await store.put(workspace_identity_key(NAME), encode_identity(WORKSPACE_ID))
        numbers = []
        async with start(store, Node()) as session:
            for step in steps:
                await step(session)
                numbers.append(int(await session.streamer.barrier()))
        return numbers

    return trio.run(main)
