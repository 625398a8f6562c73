"""The workspace as a plain directory, without FUSE: scanned on the way out, laid out and filled on the way in.

A newcomer's way through:

    going out   watching (inotify: where to look) → walking (scandir against what is known) → core/witness,
                core/treediff (what it means) → reading (one file, under a read lease, to frames) → adopting (one step)
    coming back identity, core/guard (may it be laid out?) → restoring (plan, comparing; laying: small files whole,
                large ones as choosing says) → filling (bytes, the most wanted first; order, lateness); taking (what an
                earlier daemon left), dropping (keep_local); engine/through (blocks past the cache)
                leases, keeper (a process of its own; keeper_files: what it decides), keeper_wire (what is said),
                keeping (the daemon's side; keeper_link: finding or starting it)
    together    scanner (walk, read, adopt, again and again)
"""
