"""Simulated providers: one seeded market, spoken to in Vast's and RunPod's own protocols.

The protocols are so exact that the official clients work against them unmodified. Sections of `providers.md` in these
docstrings are the providers' contracts as they were read from public sources; nothing here is the providers' code.

Layers, each knowing only those below it:

- `command`, `simulation`: the command, and putting it together (`simulating` is what tests use)
- `control`, `events`, `oracles`: what only a test may do: order faults, move time, ask for the truth
- `app`: the way of a request, with faults and limits; `server` and `transport` bring requests to it
- `vast`, `runpod`: the protocols, over `calls` (routes), `limits` and `faults`
- `market`: machines, prices, other customers, rentals, bills; `processes` stands behind its port `market.nodes`
- `wire`, `journal`, `clock`, `draws`, `latencies`: values and services without a provider
"""
