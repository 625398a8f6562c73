"""RunPod's three protocols over the simulated market (providers.md, section 2).

`v2_front` and `v2` are REST v2, the primary one, with `pods` and `catalog` as its views, `checks` as its request
schemas and `problems` as its errors; `graph` and `resolvers` are the subset of GraphQL that the official SDK speaks,
with `schema` as its types; `v1` is the retired REST v1. `placing` finds a machine for an order, for all three.
"""
