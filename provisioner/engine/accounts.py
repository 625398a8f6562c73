"""One provider account: its listings, and calls that are sent once (create) or until they succeed (all others).

Invariant: a create is sent only after its intent was seen to arrive in the mirror and no higher controller was seen;
what keeps it from being sent is CreateRefused, what happens after that is what the provider says.
"""

from __future__ import annotations

import trio

from provisioner.core.errors import (
    BadWish,
    NoCredit,
    ProviderDenied,
    ProviderRefused,
    ProviderUnavailable,
    ProvisionerError,
    StoreDenied,
    StoreUnavailable,
)
from provisioner.core.intents import Intent
from provisioner.core.jobs import JobSpec
from provisioner.core.offers import Offer
from provisioner.core.ports import Capabilities, Clock, CreateOutcome, CreateRefused, Launch, Provider, RefusedWhy
from provisioner.engine.books import Books
from provisioner.engine.fencing import Fence
from provisioner.engine.ports import EnginePorts, EngineSettings, Listing, Listings


class DirectListings:
    """`ports.Listings` that asks the provider each time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def listing(self, provider: Provider, fresh_s: float) -> Listing:
        """Ask now; the time counts from before the call waits for its turn, which errs on the safe side."""
        asked_at_s = self._clock.now_s()
        return Listing(asked_at_s, tuple(await provider.list_instances()))


class Account:
    """A provider as one job uses it."""

    def __init__(self, provider: Provider, capabilities: Capabilities, ports: EnginePorts) -> None:
        self.provider = provider
        self.capabilities = capabilities
        self._settings: EngineSettings = ports.settings
        self._listings: Listings = ports.listings or DirectListings(ports.clock)

    @property
    def name(self) -> str:
        """As in `--providers`."""
        return self.provider.name

    async def listing(self, fresh_s: float) -> Listing:
        """Return a complete listing, or raise ProviderUnavailable or ProviderDenied."""
        with trio.move_on_after(self._settings.call_s):
            return await self._listings.listing(self.provider, fresh_s)
        raise ProviderUnavailable(f"{self.name}: no listing within {self._settings.call_s:.0f} s")

    async def destroy(self, instance_id: str) -> str:
        """Ask for the end of an instance; return why it was not accepted, or nothing when it was."""
        try:
            with trio.fail_after(self._settings.call_s):
                await self.provider.destroy(instance_id)
        except trio.TooSlowError:
            return f"no answer within {self._settings.call_s:.0f} s"
        except ProvisionerError as error:
            return str(error)
        return ""

    async def rebid(self, instance_id: str, bid_usd_h: float) -> str:
        """Raise a bid; return why it was not accepted, or nothing when it was."""
        rebid = getattr(self.provider, "rebid", None)
        if rebid is None or not self.capabilities.rebid:
            return f"{self.name} brings nothing back for a higher bid"
        try:
            with trio.fail_after(self._settings.call_s):
                await rebid(instance_id, bid_usd_h)
        except trio.TooSlowError:
            return f"no answer within {self._settings.call_s:.0f} s"
        except ProvisionerError as error:
            return str(error)
        return ""


class Creator:
    """Sends creates, each once."""

    def __init__(self, ports: EnginePorts, books: Books, fence: Fence) -> None:
        self._ports = ports
        self._books = books
        self._fence = fence

    async def create(self, account: Account, intent: Intent, offer: Offer, spec: JobSpec) -> CreateOutcome:
        """Send the intent's create, or say why it was not sent. Raises Superseded, and then nothing was sent."""
        launch = await self._prepared(intent, offer, spec)
        if isinstance(launch, CreateRefused):
            return launch
        assert launch.label == intent.label, f"{launch.label} is not the label of {intent.ident}"
        return await account.provider.create(launch)

    async def _prepared(self, intent: Intent, offer: Offer, spec: JobSpec) -> Launch | CreateRefused:
        """Do all that must come before a create; the look at the fence is the last of it."""
        patience_s = self._ports.settings.mirror_s
        with trio.move_on_after(patience_s):
            try:
                launch = await self._ports.launch_maker(intent, offer, spec)
                await self._books.mirrored(intent.ident)
                await self._fence.check()
            except BadWish as error:
                return CreateRefused(RefusedWhy.BAD_REQUEST, f"not sent: {error}")
            except (StoreUnavailable, StoreDenied) as error:
                return CreateRefused(RefusedWhy.RATE_LIMITED, f"not sent: {error}")
            except (ProviderUnavailable, ProviderRefused) as error:
                return CreateRefused(RefusedWhy.NO_CAPACITY, f"not sent: {error}")
            except NoCredit as error:
                return CreateRefused(RefusedWhy.NO_CREDIT, f"not sent: {error}")
            except ProviderDenied as error:
                return CreateRefused(RefusedWhy.DENIED, f"not sent: {error}")
            return launch
        return CreateRefused(
            RefusedWhy.RATE_LIMITED, f"not sent: the store did not take its intent within {patience_s:.0f} s"
        )
