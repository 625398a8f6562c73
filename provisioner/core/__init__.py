"""PURE: decides what to rent, who wins, who is destroyed and what it costs. No I/O, clock, randomness or await.

    gpus        one name per GPU model, whatever each provider calls it
    offers      what a provider would rent, with its price split into parts
    wishes      what the user asks for, checked again on our side, with a reason for each rejected offer
    ports       a provider, the clock and entropy, as Protocols; errors
    timing      how long a candidate takes, phase by phase, with the source of each figure
    ranking     which offers race first
    blocklist   machines that failed, and until when they are left alone
    intents     ledger records: one intent before each create, and its states
    race…       the race as a state machine: (state, event) -> (state, commands)
    detect      when a node counts as lost
    jobs        what is to be kept running, as it lies in the store
    rendezvous  what controller and nodes tell each other through the store
    happenings  what a controller tells whoever watches it; the record of one failover
    cost, plan  money and feasibility
    bootstrap   the script a rented container runs

Times are seconds since the epoch where a name ends in `_at_s`, durations where it ends in `_s`; GB are 10^9 bytes,
as providers bill them; `usd_h` is US dollars per hour for the whole machine, `usd_gpu_h` for one of its GPUs.
"""
