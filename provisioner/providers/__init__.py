"""Adapters behind `core.ports.Provider`, one module per service; docs/PROVIDERS.md shows how to add one.

`http` and `gates` are how a service is spoken to, `reading` how its answers are read. `vast` with `vast_rows`,
`runpod` (REST v2) with `runpod_graph` (GraphQL, behind a probe), and `local` (process groups on this machine).
"""
