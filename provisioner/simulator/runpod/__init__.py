"""RunPod's three protocols over the simulated market (providers.md, section 2).

`v2` is REST v2, the primary one, with `pods` and `catalog` as its views and `checks` as its request schemas; `graph` is
the subset of GraphQL that the official SDK speaks, with `schema` as its types; `v1` is the retired REST v1. `placing`
finds a machine for an order, the same way for all three.
"""
