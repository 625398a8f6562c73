"""Gather real text that every machine has: the sources of Python's standard library, in sorted order, to a fixed size.

Invariant: the same interpreter gives the same bytes, so two runs on one machine can be compared bit by bit.
"""

import sysconfig
from pathlib import Path

CORPUS_BYTES = 4 << 20


def gather() -> bytes:
    """Return CORPUS_BYTES of source text, or raise RuntimeError if the library is smaller than that."""
    library = Path(sysconfig.get_path("stdlib"))
    pieces, size = [], 0
    for path in sorted(library.glob("*.py")) + sorted(library.glob("*/*.py")):
        piece = path.read_bytes()
        pieces.append(piece)
        size += len(piece)
        if size >= CORPUS_BYTES:
            return b"".join(pieces)[:CORPUS_BYTES]
    raise RuntimeError(f"{library} holds only {size} bytes of Python sources; the corpus needs {CORPUS_BYTES}")
