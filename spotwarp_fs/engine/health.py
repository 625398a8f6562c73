"""Whether the store answers, what it said last, and how long to wait before the next try.

Invariant: a failure never ends anything by itself (P-09); it only makes the next try later, with jitter, up to a limit.
"""

from __future__ import annotations

import trio

from spotwarp_fs.core.ports import Entropy
from spotwarp_fs.engine.settings import EngineSettings


class StoreHealth:
    """Shared by everything that talks to the store."""

    def __init__(self, settings: EngineSettings, entropy: Entropy) -> None:
        self._settings = settings
        self._entropy = entropy
        self._failures = 0
        self._recovered = trio.Event()
        self.last_error = ""
        self.failing_since_s: float | None = None

    @property
    def reachable(self) -> bool:
        """The last request succeeded."""
        return self.failing_since_s is None

    def succeeded(self) -> None:
        """Note an answer, and wake everybody who waits out a failure."""
        self._failures = 0
        if self.failing_since_s is not None:
            self.failing_since_s = None
            self.last_error = ""
            self._recovered.set()
            self._recovered = trio.Event()

    async def failed(self, error: Exception) -> None:
        """Note a failure and wait before the next try (less, if somebody else succeeds meanwhile)."""
        self.last_error = f"{type(error).__name__}: {error}"
        if self.failing_since_s is None:
            self.failing_since_s = trio.current_time()
        self._failures += 1
        await self.pause(self._failures)

    async def pause(self, attempt: int) -> None:
        """Wait before try number *attempt* + 1: exponential, jittered, limited."""
        limit = min(self._settings.retry_max_s, self._settings.retry_first_s * 2 ** min(attempt - 1, 16))
        jitter = 0.5 + self._entropy.token_bytes(1)[0] / 512
        recovered = self._recovered
        with trio.move_on_after(limit * jitter):
            await recovered.wait()
