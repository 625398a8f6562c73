"""The agent on a rented node: it checks the machine, lets `spotwarp run` prefetch, and does what the controller orders.

    main      the entry of the archive: arguments, environment, exit code
    errand    what this node is for and where things lie, from environment and the job's spec
    deciding  PURE: (state, event) -> (state, commands); the report is part of the state
    checks    GPU and store, measured; cuda is the process that talks to the driver
    running   the `spotwarp run` below us: start, stop, its output's end, the notes it leaves
    agent     trio: events in, commands out, report and log into the store

Invariant: only the workspace's newest manifest says who holds it. What is reported from here is for deciding sooner and
for people; what an agent cannot tell the store never stops the training.
"""
