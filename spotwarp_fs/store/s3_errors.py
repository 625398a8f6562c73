"""What each answer of an S3 server, and each failure to get one, means in the words of the error tree.

Invariant: NotFound is only said when the server itself named the key as absent; whatever is not understood is
Unavailable, because trying again harms nothing and giving up may lose a day.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from botocore import exceptions as sdk

from spotwarp_fs.core.errors import (
    Conflict,
    Denied,
    ExitCode,
    NotFound,
    PreconditionFailed,
    SpotwarpError,
    StoreRefused,
    Unavailable,
    Unsupported,
    UserError,
)
from spotwarp_fs.store.limits import Answered, Throttled

CREDENTIAL_CODES: Final = frozenset(
    {
        "AccessDenied",
        "AccountProblem",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidSecurity",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnrecognizedClientException",
        "InvalidClientTokenId",
    }
)
SKEW_CODES: Final = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
THROTTLE_CODES: Final = frozenset(
    {
        "SlowDown",
        "SlowDownRead",
        "SlowDownWrite",
        "TooManyRequests",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "ServiceUnavailable",
        "rateLimitExceeded",
    }
)
UNSUPPORTED_CODES: Final = frozenset({"NotImplemented", "UnsupportedOperation"})
FULL_CODES: Final = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"})
SERVER_ERRORS_FROM: Final = 500
TRANSIENT_4XX: Final = frozenset({"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"})
SKEW_TOLD_S: Final = 300.0
TOO_BIG: Final = "EntityTooLarge"

NO_CREDENTIALS: Final = (
    sdk.NoCredentialsError,
    sdk.PartialCredentialsError,
    sdk.CredentialRetrievalError,
    sdk.TokenRetrievalError,
    sdk.SSOError,
    sdk.MetadataRetrievalError,
    # A credentials file that is being rewritten in place looks like these for a moment.
    sdk.ConfigParseError,
    sdk.ProfileNotFound,
)
MISTAKES: Final = (
    sdk.ParamValidationError,
    sdk.NoRegionError,
    sdk.InvalidRegionError,
    sdk.InvalidConfigError,
    sdk.UnknownEndpointError,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A refusal as the server worded it."""

    status: int
    code: str
    message: str
    server_time_s: float | None

    @classmethod
    def of(cls, response: Mapping[str, Any]) -> Answer:
        """Read it out of a ClientError's response, whatever is missing there."""
        about, meta = response.get("Error", {}), response.get("ResponseMetadata", {})
        return cls(
            int(meta.get("HTTPStatusCode", 0)),
            str(about.get("Code", "")),
            " ".join(str(about.get("Message", "")).split())[:200],
            date_of(meta.get("HTTPHeaders", {})),
        )


def translate(error: Exception, doing: str, *, now_s: float) -> SpotwarpError:
    """Say what *error*, met while *doing* something to the store, asks us to do next."""
    if isinstance(error, sdk.ClientError):
        return _from_answer(Answer.of(error.response), doing, now_s)
    if isinstance(error, NO_CREDENTIALS):
        return Denied(f"{doing}: no usable credentials ({error})")
    if isinstance(error, MISTAKES):
        return UserError(f"{doing}: {error}", ExitCode.CONFIG)
    return Unavailable(f"{doing}: {type(error).__name__}: {error}")


def _from_answer(answer: Answer, doing: str, now_s: float) -> SpotwarpError:
    said = f"{doing}: {answer.status} {answer.code}: {answer.message}"
    for kind in (_absent, _credentials, _condition, _load):
        found = kind(answer, said, now_s)
        if found is not None:
            return found
    if answer.code == TOO_BIG or answer.status == 413:
        return StoreRefused(said)
    return Answered(said) if answer.status >= SERVER_ERRORS_FROM else Unavailable(said)


def _absent(answer: Answer, said: str, now_s: float) -> SpotwarpError | None:
    if answer.code == "NoSuchKey" and answer.status == 404:
        return NotFound(said)
    if answer.code == "NoSuchBucket":
        missing = StoreRefused(f"{said}; create the bucket, or correct its name or the endpoint")
        missing.exit_code = ExitCode.CONFIG
        return missing
    return None


def _credentials(answer: Answer, said: str, now_s: float) -> SpotwarpError | None:
    if answer.code in SKEW_CODES:
        server = "unknown" if answer.server_time_s is None else _shown(answer.server_time_s)
        return Denied(f"{said}; clocks differ: store {server}, this node {_shown(now_s)}; set this node's clock")
    if answer.code in FULL_CODES:
        return Unavailable(f"{said}; the store is full")
    if answer.code not in CREDENTIAL_CODES and answer.status not in (401, 403):
        return None
    if answer.server_time_s is not None and abs(answer.server_time_s - now_s) > SKEW_TOLD_S:
        said += f"; clocks differ: store {_shown(answer.server_time_s)}, this node {_shown(now_s)}"
    if said.startswith(("GET", "HEAD")):
        said += " (so says a store about absent keys too, to whom may not list the bucket)"
    if answer.code.startswith("Expired"):
        said += "; get new credentials"
    elif answer.code == "AccessDenied":
        said += "; these credentials must be allowed to get, put, list and delete there"
    return Denied(said)


def _condition(answer: Answer, said: str, now_s: float) -> SpotwarpError | None:
    # Older MinIO answers 304 to a create-only PUT of an existing key.
    if answer.status in (304, 412) or answer.code == "PreconditionFailed":
        return PreconditionFailed(said)
    if answer.status == 409:
        return Conflict(said)
    return None


def _load(answer: Answer, said: str, now_s: float) -> SpotwarpError | None:
    if answer.code in TRANSIENT_4XX:
        return Unavailable(said)
    if answer.status in (429, 503) or answer.code in THROTTLE_CODES:
        return Throttled(said)
    if answer.status == 501 or answer.code in UNSUPPORTED_CODES:
        return Unsupported(said)
    return None


def date_of(headers: Mapping[str, str]) -> float | None:
    """Read the server's clock off an answer, or None when it does not tell."""
    try:
        return parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return None


def _shown(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
