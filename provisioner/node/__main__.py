"""`python -m provisioner.node run --job JOB`: the agent of a rented node, as the archive's `node.py` starts it."""

from __future__ import annotations

import sys

from provisioner.node.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
