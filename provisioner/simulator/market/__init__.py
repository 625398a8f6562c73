"""The market itself, which knows no protocol: machines, prices, other customers, rentals and bills.

`world` is the whole; `claims` says who gets a machine's GPUs, `lives` how an instance lives, `ledger` what it costs,
`rivals` what other customers do, `agenda` what is planned, `scenario` how big and how mean it is.
"""
