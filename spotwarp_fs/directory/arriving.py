"""Look at what a walk found more closely: symlink targets and extended attributes.

Invariant: nothing is opened, and what has vanished meanwhile is left out.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Final

from spotwarp_fs.core.walked import Found
from spotwarp_fs.core.xattrs import NAMESPACES
from spotwarp_fs.directory.adopting import Arrival, is_visible
from spotwarp_fs.directory.reading import Reading

UNKEPT: Final = (b"security.selinux", b"security.ima", b"security.evm", b"user.spotwarp.absent")
"""Labels that belong to the machine or to us, not to the file."""


def arrivals(root: bytes, found: Sequence[Found], readings: Mapping[bytes, Reading]) -> list[Arrival]:
    """Make arrivals of what was found (blocking), in the same order."""
    result = []
    for item in found:
        path = os.path.join(root, item.path) if item.path else root
        try:
            target = os.readlink(path) if stat.S_ISLNK(item.status.st_mode) else b""
            attributes = visible_xattrs(path)
        except OSError:
            continue  # the next walk sees what became of it
        result.append(Arrival(item.path, item.status, attributes, target, readings.get(item.path)))
    return result


def visible_xattrs(path: bytes) -> dict[bytes, bytes] | None:
    """Give the attributes of a file that this process may see and the workspace keeps; None where there are none."""
    if not hasattr(os, "listxattr"):
        return None
    try:
        names = [os.fsencode(name) for name in os.listxattr(path, follow_symlinks=False)]
        return {
            name: os.getxattr(path, name, follow_symlinks=False)
            for name in names
            if name.startswith(NAMESPACES) and name not in UNKEPT and is_visible(name)
        }
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EPERM, errno.EACCES, errno.ENODATA):
            return None
        raise
