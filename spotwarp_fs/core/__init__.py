"""The pure decisions: no I/O, clock, randomness, threads, logging or await in here."""
