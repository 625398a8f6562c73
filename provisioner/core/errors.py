"""Every error of the provisioner says what to do about it.

ProvisionerError
├── ProviderUnavailable   no useful answer (timeout, 5xx, a body that is no JSON); try again later
│   └── RateLimited       429: the same call may be sent again after `retry_after_s`
├── ProviderDenied        the account's key is missing, wrong or revoked: stop using this provider, tell the user
├── NoCredit              the account cannot pay: stop renting here, tell the user
├── ProviderRefused       the provider answered and said no: the same call is useless
├── StoreUnavailable      the store that controller and nodes meet in does not answer: nothing is decided without it
├── StoreDenied           the store refuses the keys
├── LedgerCorrupt         a ledger record is not what its version says: never guess
└── BadWish               bad input: show the message

`create` raises none of them for what it sent: its outcome is a value (`ports.CreateOutcome`), because an error there
hides whether something is being paid for. Messages never carry a key, a header or a request body (P-15).
"""

from __future__ import annotations


class ProvisionerError(Exception):
    """Root of the tree above."""


class ProviderUnavailable(ProvisionerError):
    """The provider did not answer usefully."""


class RateLimited(ProviderUnavailable):
    """The provider wants fewer calls."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ProviderDenied(ProvisionerError):
    """The provider refused the account's key."""


class NoCredit(ProvisionerError):
    """The account's balance does not allow the call."""


class ProviderRefused(ProvisionerError):
    """The provider answered and refused."""


class StoreUnavailable(ProvisionerError):
    """The store did not answer usefully."""


class StoreDenied(ProvisionerError):
    """The store refused the credentials."""


class LedgerCorrupt(ProvisionerError):
    """A ledger record cannot be read."""


class BadWish(ProvisionerError):
    """The user's options cannot be met or read."""
