"""Keep one job running: watch its node, race for another when it is lost, end everything when the command has ended.

    ports        what the engine needs: providers, store, ledger, clock; its settings; what a user may ask of it
    job          run_job: take control, recover, decide until the job has ended
    fencing      who controls the job: a number in the store, created once, and a heartbeat
    books        the ledger with its mirror in the store: records, blocklist, failovers, money
    outbox       objects on their way into the store, newest last, tried until they are there
    accounts     one provider account: its listings, and calls that are sent once or until they succeed
    sharing      several jobs on one machine: one poll and one limit per account
    eyes         reads the store: heartbeat, head, reports, requests
    searching    offers of all providers, checked, priced and ranked
    keeper       hears of one thing after the other
    deciding     the decisions, after each of them; none of them waits
    ending       the end of a job: publish, destroy, verify
    leaving      reasons to move away from a node that is well: its contract ends, its account runs dry
    racing       carries out what the race wants done
    watching     the node that holds the workspace: what was seen of it, and the verdict
    timeline     when what happened in a failover, as the controller saw it
    collecting   gc_nodes: destroys what no live job owns

**The loop.** Everything that waits is a task of its own (listings, store reads, creates, destroys, searches, mirror)
and ends in a message to one inbox. The keeper takes one message after the other and decides without waiting: it steps
the pure race (`core.race`) and the watch (`core.detect`), and starts tasks for what they want done. So no decision is
interleaved with another, and what a task was told when it began may be old, never wrong.

**Who holds the workspace** is what the newest manifest says. There is always one race object: decided and settled
while a node runs, running when none does. It takes every listing, so an instance that appears late is reaped whenever
it appears. A new race starts from the ledger's records and takes over whatever the one before has not settled.

**What is durable before what.**
1. A record is in the ledger (synced) before the command after it is carried out, and in the mirror soon after.
2. A create is sent after: its intent is in the ledger *and in the mirror*, then a look at `controllers/` shows no
   higher number. A new controller creates its number first and reads the mirror after that. So either it finds the
   intent, or the old controller finds the number and does not send.
3. A permit is in the ledger before it is in the node's orders.
4. A failover is in the ledger before the observer hears of its end.
5. The end of a job is the last holder's own report, which outlives its node: teardown goes on after any crash.

**Blind means still.** While the store cannot be read, no race starts, nobody may claim, candidates are not judged.
Cancelling `run_job` leaves everything as it is: nodes go on, and the next controller recovers from ledger or mirror.
"""

from provisioner.engine.collecting import Collected, gc_nodes
from provisioner.engine.job import run_job
from provisioner.engine.ports import (
    ControllerAlive,
    EnginePorts,
    EngineSettings,
    LedgerPort,
    Me,
    Superseded,
)
from provisioner.engine.sharing import SharedAccount, SharedListings

__all__ = [
    "Collected",
    "ControllerAlive",
    "EnginePorts",
    "EngineSettings",
    "LedgerPort",
    "Me",
    "SharedAccount",
    "SharedListings",
    "Superseded",
    "gc_nodes",
    "run_job",
]
