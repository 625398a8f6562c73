"""What the user sees of failover: the commands that this package adds to `spotwarp`, and how they show things.

    parsing, wishing, secret_input   what was typed -> `JobSpec`, or an error that says what to type
    accounts, market                 providers by name with their keys; all of them searched at once
    workload, planning, plan_view    what a job needs, what it would cost and how fast it comes back
    screen, live                     happenings -> what is on the screen (pure); a terminal, plain lines or JSON
    jobs_here, asking                jobs and their controllers: on this machine, in the store; requests to them
    history, report_*                what a job has cost and saved, as text, JSON and one HTML page

Invariant: this table is all that is imported for `spotwarp --help`; a command's module, and what it needs, comes when
it runs. No key, and nothing of an environment file, is in what is shown, logged or raised (P-15).
"""

COMMANDS = {
    "plan": ("provisioner.cli.plan", "Say what a job needs, costs and loses, from live offers."),
    "failover": ("provisioner.cli.failover", "Keep a command running on spot GPUs until it has succeeded."),
    "ps": ("provisioner.cli.ps", "List jobs: node, price, health, spend, controller."),
    "logs": ("provisioner.cli.logs", "Show the end of a job's output, from the store."),
    "ssh": ("provisioner.cli.ssh", "Open a shell on a job's node."),
    "move": ("provisioner.cli.move", "Move a running job to another node; nothing is lost."),
    "down": ("provisioner.cli.down", "End a job, verify that nothing is billed; its data stays."),
    "report": ("provisioner.cli.report", "Show time, money and loss of each failover."),
    "gc-nodes": ("provisioner.cli.gc_nodes", ""),
}
"""Module and short help by name, as `spotwarp_fs.cli.plugins` reads it; without help it is not listed."""
