"""Every limit of the engine in one place: queues, waits, sizes and ages.

Invariant: no other engine module holds a number that bounds memory, time or retries.
"""

from __future__ import annotations

from dataclasses import dataclass

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits and ages; seconds and bytes. `cli/settings.py` fills what users may set."""

    interval_s: float = 30.0
    """A cut at least this often while anything is unpublished (P-04)."""
    atomic_max_age_s: float = 900.0
    """How much older than the head a quiescent state may be to be served instead (P-05)."""
    write_wait_max_s: float = 300.0
    """A writer waits this long for budget, then gets ENOSPC (P-10)."""
    read_wait_max_s: float = 3600.0
    """A read of bytes that are not here keeps trying this long: a failed page fault is a SIGBUS."""
    fsync_remote: bool = False
    """`fsync` returns when published, not when local."""
    rename_publish_wait_s: float = 10.0
    """So long a new name of a remotely fsynced file may wait to be published: the kernel has its directory locked."""

    journal_bytes_max: int = 64 * MiB
    """A longer fsync journal is written anew, as one record."""
    journal_linger_s: float = 0.5
    """How soon the journal learns of truncations and removals that nobody waits for."""

    cold_after_s: float = 1.0
    """A dirty block unwritten for this long is uploaded before the cut."""
    early_upload_period_s: float = 0.25
    early_upload_batch: int = 256
    pack_bytes_target: int = 16 * MiB
    pack_linger_s: float = 1.0
    """An early pack that does not fill is uploaded after this pause."""
    packs_in_flight_max: int = 4
    frames_in_memory_max: int = 96
    """Blocks read, encoded or waiting in a pack: at most about this many MiB."""
    hydrate_parallel_max: int = 24
    hydrate_run_blocks: int = 8
    """Neighbouring frames of one pack are fetched in one ranged GET of up to so many blocks."""
    hydrate_gap_bytes: int = 128 << 10
    """What lies between two frames is fetched along up to this size: cheaper than a request more."""
    hydrate_sort_bytes: int = 128 * MiB
    """What is fetched in background is put into the order of packs so many bytes at a time."""
    through_bytes_max: int = 256 * MiB
    """Blocks that are fetched past the cache, into real files: so much of them is in memory at once."""
    readahead_blocks_max: int = 128
    whole_files_max: int = 4
    """Files that are fetched whole at the same time because of the way they are read."""
    warm_cache: bool = True
    """A takeover warms the cache of a mount; a plain directory has none."""
    warm_bytes_max: int = 64 << 30
    """What a takeover fetches unasked, at most (0: nothing), unless `hydrate_all`."""
    warm_cache_share: float = 0.8
    """It stops when the cache is filled to this share of its budget."""
    warm_file_bytes_max: int = 256 << 10
    """Files up to this size count as small: they come together, many in one request."""
    warm_small_files_max: int = 50_000
    warm_small_bytes_max: int = 2 << 30
    hydrate_all: bool = False
    """After a takeover fetch everything that fits."""
    trace_s: float = 300.0
    """So long, from the first read of a session on, it is noted what is read."""
    trace_files_max: int = 8192
    trace_bytes_max: int = 64 << 30
    sections_cached: int = 8

    cache_bytes_max: int = 1 << 62
    """Budget for data files and spool; the engine also keeps `disk_reserve_bytes` free on the disk."""
    disk_reserve_bytes: int = 256 * MiB
    evict_low_share: float = 0.9
    """Eviction starts above this share of the budget and ends below it."""

    heartbeat_s: float = 10.0
    lease_s: float = 60.0
    """A heartbeat of the head's writer epoch younger than this (server time) means a live writer."""
    retry_first_s: float = 0.2
    retry_max_s: float = 10.0
    outage_probe_s: float = 2.0
    restart_store_wait_s: float = 1.5
    """How long a restart with a trusted cache waits for the store before it serves without."""

    rebase_manifests_max: int = 256
    rebase_share: float = 0.5
    rebase_bytes_min: int = 4 * MiB
    """Change sets smaller than this in all are not worth a new base."""

    collect_first_s: float = 300.0
    """The first collection of a session, after it began to serve."""
    collect_period_s: float = 600.0
    grace_s: float = 600.0
    """A pack is deleted this long after a published state condemned it."""
    condemn_changes_max: int = 100_000
    """With more unpublished changes than this nothing is condemned: looking at them would stall requests."""
    repack_bytes_max: int = 512 * MiB
    """Bytes copied out of sparse packs by one collection."""
    closes_wait_s: float = 1.0
    """A cut waits this long for atomic files that were flushed and are about to be released (C11)."""

    retain_recent_s: float = 3600.0
    """States younger than this stay readable, whatever else is collected."""
    drain_s: float = 120.0
    fence_grace_s: float = 2.0
    generations_max: int = 200_000
    """Generations of blocks that are remembered one by one: about 20 MiB."""
    inode_batch: int = 1024
    """Inode numbers reserved per persisted step of the counter."""
