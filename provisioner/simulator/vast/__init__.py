"""Vast.ai's REST API over the simulated market (providers.md, section 1).

`front` has the routes, `search` and `offers` the market as renters see it, `create` the many ways in which a create
call can end, `rows` and `listing` an instance as the API shows it, `verbs` what can be done with it.
"""
