"""What one machine remembers of its jobs: LMDB in the state directory, synced before a write returns."""

from provisioner.ledger.store import LmdbLedger

__all__ = ["LmdbLedger"]
