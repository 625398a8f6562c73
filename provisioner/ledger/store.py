"""The ledger on disk: one LMDB environment per machine, for all its jobs.

    i/<job>/<ident>     intents.encode: the newest record of each intent
    f/<job>/<6 digits>  happenings.encode_failover
    s/<job>             jobs.encode_spec
    b                   blocklist.encode, for all jobs

Invariant: a method that writes returns after LMDB has synced its commit. Several processes may have it open at once. A
value that cannot be read is LedgerCorrupt with its key; nothing is guessed, left out or repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import lmdb

from provisioner.core import blocklist as blocking
from provisioner.core import happenings, intents, jobs
from provisioner.core.blocklist import Blocked, Blocklist
from provisioner.core.errors import BadWish, LedgerCorrupt
from provisioner.core.happenings import Failover
from provisioner.core.intents import IntentRecord
from provisioner.core.jobs import JobSpec

MAP_BYTES: Final = 1 << 28
"""Address space, not disk; a record has about 600 bytes."""
READERS_MAX: Final = 128
_BLOCKLIST: Final = b"b"
Value = TypeVar("Value")


class LmdbLedger:
    """`engine.ports.LedgerPort` in the directory *path*, which is made if it does not exist."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = path
        with self._damage():
            # A record that a power loss takes back would let a create be sent twice: every commit is synced.
            self._env = lmdb.open(str(path), map_size=MAP_BYTES, max_readers=READERS_MAX, sync=True, metasync=True)
            self._env.reader_check()

    def close(self) -> None:
        """Let go of the file."""
        self._env.close()

    def records(self, job: str) -> Sequence[IntentRecord]:
        """Return the newest record of each intent."""
        return [self._read(key, raw, intents.decode) for key, raw in self._all(f"i/{job}/")]

    def append(self, job: str, record: IntentRecord) -> None:
        """Keep *record* as the newest of its intent."""
        self._put(f"i/{job}/{record.intent.ident}".encode(), intents.encode(record))

    def failovers(self, job: str) -> Sequence[Failover]:
        """Return all of them, oldest first."""
        return [self._read(key, raw, happenings.decode_failover) for key, raw in self._all(f"f/{job}/")]

    def add_failover(self, job: str, failover: Failover) -> None:
        """Keep one; the same number again replaces it."""
        self._put(f"f/{job}/{failover.number:06d}".encode(), happenings.encode_failover(failover))

    def blocklist(self) -> Blocklist:
        """Return the machines that failed, for all jobs."""
        with self._damage(), self._env.begin() as transaction:
            raw = transaction.get(_BLOCKLIST)
        return Blocklist() if raw is None else self._read(_BLOCKLIST, raw, blocking.decode)

    def block(self, entry: Blocked, now_s: float) -> None:
        """Add one, in one transaction, since other jobs add theirs."""
        with self._damage(), self._env.begin(write=True) as transaction:
            raw = transaction.get(_BLOCKLIST)
            known = Blocklist() if raw is None else self._read(_BLOCKLIST, raw, blocking.decode)
            transaction.put(_BLOCKLIST, blocking.encode(known.with_entry(entry, now_s)))

    def spec(self, job: str) -> JobSpec | None:
        """Return what is to be kept running."""
        key = f"s/{job}".encode()
        with self._damage(), self._env.begin() as transaction:
            raw = transaction.get(key)
        return None if raw is None else self._read(key, raw, jobs.decode_spec)

    def keep_spec(self, spec: JobSpec) -> None:
        """Keep it."""
        self._put(f"s/{spec.job}".encode(), jobs.encode_spec(spec))

    def jobs(self) -> Sequence[str]:
        """Return the names of all jobs that have a spec or an intent."""
        named = {key.decode().split("/")[1] for prefix in ("s/", "i/") for key, _ in self._all(prefix)}
        return sorted(named)

    def _put(self, key: bytes, value: bytes) -> None:
        with self._damage(), self._env.begin(write=True) as transaction:
            transaction.put(key, value)

    def _all(self, prefix: str) -> list[tuple[bytes, bytes]]:
        start = prefix.encode()
        with self._damage(), self._env.begin() as transaction, transaction.cursor() as cursor:
            return list(_below(cursor, start))

    def _read(self, key: bytes, raw: bytes, decode: Callable[[bytes], Value]) -> Value:
        try:
            return decode(raw)
        except (LedgerCorrupt, BadWish) as error:
            raise LedgerCorrupt(
                f"{self._path}: the record {key.decode(errors='replace')!r} cannot be read ({error}); move the "
                "directory away to recover from the mirror in the store, and keep it: it says what was rented"
            ) from error

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except lmdb.MapFullError:
            raise
        except lmdb.Error as error:
            raise LedgerCorrupt(
                f"{self._path}: LMDB says {error}; move the directory away to recover from the mirror in the store"
            ) from error


def _below(cursor: Any, start: bytes) -> Iterator[tuple[bytes, bytes]]:
    if cursor.set_range(start):
        for key, value in cursor:
            if not bytes(key).startswith(start):
                return
            yield bytes(key), bytes(value)
