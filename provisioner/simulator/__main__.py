"""`python -m provisioner.simulator`: say what is missing, or run the command."""

import importlib.util
import sys

if importlib.util.find_spec("graphql") is None:
    sys.exit("simulator: RunPod's GraphQL needs graphql-core: pip install 'spotwarp[simulator]'")

from provisioner.simulator.command import main

main()
