"""The workspace as a plain directory, without FUSE: scanned on the way out, laid out and filled on the way in.

A newcomer's way through:

    going out   watching (inotify: where to look) → walking (scandir against what is known) → core/witness,
                core/treediff (what it means) → reading (one file, under a read lease, to frames) → adopting (one step)
    coming back restoring (placeholders and small files at once, the rest by priority) → filling (one file's bytes)
                leases, keeper (a process of its own; keeper_files: what it decides), keeper_wire (what is said),
                keeping (the daemon's side; keeper_link: finding or starting it)
    together    identity (the wipe guard), serving (session, scans and control until the end)
"""
