"""A metadata map in a dictionary: what the namespace rules run on when nothing else is to be tested."""

from __future__ import annotations

from collections.abc import Iterator


class DictMap:
    """A KVWrite without any transaction."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    def get(self, key: bytes) -> bytes | None:
        return self.rows.get(key)

    def scan(self, start: bytes, stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        keys = sorted(key for key in self.rows if key >= start and (stop is None or key < stop))
        return iter([(key, self.rows[key]) for key in keys])

    def put(self, key: bytes, value: bytes) -> None:
        self.rows[key] = value

    def delete(self, key: bytes) -> bool:
        return self.rows.pop(key, None) is not None


class DictTree(DictMap):
    """A TreeWrite that insists on each table being written the way it should: exported, or local to the node."""

    def put(self, key: bytes, value: bytes) -> None:
        assert key[:1].islower(), f"{key!r} is of a node table"
        super().put(key, value)

    def delete(self, key: bytes) -> bool:
        assert key[:1].islower(), f"{key!r} is of a node table"
        return super().delete(key)

    def put_local(self, key: bytes, value: bytes) -> None:
        assert key[:1].isupper(), f"{key!r} is of a published table"
        super().put(key, value)

    def delete_local(self, key: bytes) -> bool:
        assert key[:1].isupper(), f"{key!r} is of a published table"
        return super().delete(key)
