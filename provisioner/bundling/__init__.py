"""The archive that a rented node unpacks and runs, made by the controller and put into the store once.

    wheels      which packages a node needs, and how they get here: pip, for each CPython
    archive     a reproducible .tgz
    entry       node.py: finds its packages without installing anything into the image
    bundle      together, with the cache: `make_bundle` for rented nodes, `make_light_bundle` for nodes on this machine

Invariant: the same sources and the same wheels give the same bytes, so the archive's name in the store is its digest.
"""
