"""Trio tasks and their order: requests, cuts, sealing, publishing, hydrating, sessions.

A newcomer's way through, in the order of a byte:

    requests    filesystem (names) → files (handles, bytes) → blocks (steps on one file); scratch, intervals (globs)
    local state workspace (what all tasks share), dirty, use, budget (eviction, room), durability, delta, vouched,
                unsynced (fsync and its journal), recover (after a power loss, or a damaged map)
    going out   stream (when to cut) → cut → early, seal (jobs, settling) → export → metadata → publish; rebase
    coming back publish.find_head → permit (wait) → claim (attempts, node_note) → load, takeover (older, telling) →
                blockmaps, hydrate (turns, streams), warm, newest, tracing; reader, readonly, states (any
                state, without claiming)
    upkeep      history, collect, reach, repack, keepers, snapshots; salvage, stale, salvaged; heartbeat, health
    together    session (claim → serve → drain → release), report, control, settings (every limit)
"""
