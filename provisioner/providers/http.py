"""One account's HTTP: limits by waiting, answers as values, failures as the errors of `core.errors`.

Invariants: a request is sent once, here and below (no retries, no redirects); no key and no secret of a launch is in
anything this module raises or returns (P-15), whatever the service echoes, because errors are named by their class
and the service's own words are cleaned first.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httpx
import trio

from provisioner.core.errors import NoCredit, ProviderDenied, ProviderUnavailable, RateLimited
from provisioner.core.ports import CreateRefused, CreateUnknown, RefusedWhy
from provisioner.providers.gates import Gate
from provisioner.providers.reading import mapping, number, text

CONNECT_S: Final = 10.0
CALL_S: Final = 30.0
CREATE_S: Final = 60.0
"""A create may take long; giving up early only makes its outcome unknown."""
BODY_BYTES_MAX: Final = 32 * 1024 * 1024
"""A search's 2,500 rows are about 7 MB."""
WORDS_CHARS_MAX: Final = 300
SECRET_CHARS_MIN: Final = 4
"""A shorter value would be found in any sentence: `1`, `yes`."""
RETRY_AFTER_S_MAX: Final = 86_400.0

# Raised before a connection exists, so before a byte of the request was sent.
_NOTHING_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service said."""

    status: int
    document: Any
    """The JSON of the body; None when it is empty or no JSON."""
    is_json: bool
    """Whether the body is JSON or empty; else it is a page of something in between (a proxy, a load balancer)."""
    words: str
    """The service's own explanation, cleaned and short; a page that is no JSON is never quoted."""
    retry_after_s: float | None = None

    def field(self, name: str) -> str:
        """Return a top-level field as text."""
        return text(mapping(self.document).get(name))


class Http:
    """A connection pool with one account's key."""

    def __init__(
        self,
        provider: str,
        base_url: str,
        key: str,
        gates: Mapping[str, Gate],
        *,
        shared: Gate | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ProviderDenied(f"{provider}: the account's key is empty or has characters that no key has; set it")
        self._provider = provider
        self._gates = gates
        self._shared = shared
        self._secrets = (key,)
        # httpx's own transport does not retry unless told to, and its pool only before a connection is used.
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {key}", "User-Agent": "spotwarp", "Accept": "application/json"},
            timeout=httpx.Timeout(CALL_S, connect=CONNECT_S),
            follow_redirects=False,
            transport=transport,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def ask(
        self, endpoint: str, method: str, path: str, *, body: object = None, query: Mapping[str, str] | None = None
    ) -> Answer:
        """Return an answer in JSON below 500, or raise what stands in its way; 4xx other than those are the caller's.

        For calls that may be repeated. Waits for the endpoint's gates.
        """
        for gate in self._gates_of(endpoint):
            await gate.enter()
        what = f"{self._provider}: {endpoint}"
        answer, failure = await self._request(method, path, body, query, CALL_S)
        if answer is None:
            raise ProviderUnavailable(f"{what}: no answer ({failure}); try again later")
        if answer.status == 429:
            self._slow_down(endpoint, answer)
            raise RateLimited(f"{what}: too many requests ({answer.words})", answer.retry_after_s)
        if answer.status >= 500 or 300 <= answer.status < 400 or not answer.is_json:
            raise ProviderUnavailable(f"{what}: status {answer.status} ({answer.words}); try again later")
        if answer.status == 401:
            raise ProviderDenied(f"{what}: the account's key is refused ({answer.words}); set a valid one")
        if answer.status == 402:
            raise NoCredit(f"{what}: the account cannot pay ({answer.words}); add credit")
        return answer

    async def create(
        self, path: str, body: object, *, method: str, secrets: Collection[str], wait_s_max: float
    ) -> Answer | CreateRefused | CreateUnknown:
        """Send a create once. An Answer is one in JSON below 500 that is not about limits: the adapter reads it."""
        what = f"{self._provider}: create"
        sent_by_s = trio.current_time() + wait_s_max
        for gate in self._gates_of("create"):
            if not await gate.enter(sent_by_s - trio.current_time()):
                return CreateRefused(RefusedWhy.RATE_LIMITED, f"{what}: not sent, its turn is further off")
        answer, failure = await self._request(method, path, body, None, CREATE_S, secrets)
        if answer is None and failure in {error.__name__ for error in _NOTHING_SENT}:
            return CreateRefused(RefusedWhy.RATE_LIMITED, f"{what}: not sent, no connection ({failure})")
        if answer is None:
            return CreateUnknown(f"{what}: no answer ({failure})")
        said = f"{what}: status {answer.status} ({answer.words})"
        if answer.status == 429:
            self._slow_down("create", answer)
            return CreateRefused(RefusedWhy.RATE_LIMITED, said)
        if answer.status >= 500 or 300 <= answer.status < 400 or not answer.is_json:
            return CreateUnknown(said)
        return answer

    def _gates_of(self, endpoint: str) -> list[Gate]:
        own = self._gates.get(endpoint)
        return [gate for gate in (own, self._shared) if gate is not None]

    def _slow_down(self, endpoint: str, answer: Answer) -> None:
        for gate in self._gates_of(endpoint):
            gate.close_for(gate.penalty_s if answer.retry_after_s is None else answer.retry_after_s)

    async def _request(
        self,
        method: str,
        path: str,
        body: object,
        query: Mapping[str, str] | None,
        patience_s: float,
        secrets: Collection[str] = (),
    ) -> tuple[Answer | None, str]:
        """Send one request; return its answer, or None and the name of what went wrong."""
        # Escaped to ASCII, so that no odd character can fail inside httpx with the body in its message.
        content = None if body is None else json.dumps(body, allow_nan=False).encode("ascii")
        headers = {} if content is None else {"Content-Type": "application/json"}
        timeout = httpx.Timeout(patience_s, connect=CONNECT_S)
        failure = "no answer in time"
        # An answer that comes in drops never exceeds httpx's own timeouts, which count from byte to byte.
        with trio.move_on_after(patience_s + CONNECT_S):
            try:
                async with self._client.stream(
                    method, path, content=content, params=query, headers=headers, timeout=timeout
                ) as response:
                    raw = bytearray()
                    async for chunk in response.aiter_bytes():
                        raw += chunk
                        if len(raw) > BODY_BYTES_MAX:
                            return None, f"an answer of over {BODY_BYTES_MAX} bytes"
                    return _answer(response, bytes(raw), (*self._secrets, *secrets)), ""
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
                # Only its class: the text may quote a header, and the error itself holds the whole request.
                failure = type(error).__name__
        return None, failure


def cleaned(words: str, secrets: Collection[str]) -> str:
    """Return *words* on one line and short, each of *secrets* replaced in every form an echo may have.

    >>> cleaned("Invalid key abcd1234 given\\n", ["abcd1234"])
    'Invalid key *** given'
    """
    for form in sorted({form for secret in secrets for form in _forms(secret)}, key=len, reverse=True):
        words = words.replace(form, "***")
    words = " ".join(words.split())
    return words if len(words) <= WORDS_CHARS_MAX else words[:WORDS_CHARS_MAX] + "…"


def _forms(secret: str) -> Iterator[str]:
    """Yield a secret as it is, line by line, and as JSON, a shell's argument or a URL would write it."""
    for part in (secret, *secret.splitlines()):
        if len(part) >= SECRET_CHARS_MIN:
            yield from (part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1])
            yield from (quote(part, safe=""), quote(part))


def _answer(response: httpx.Response, raw: bytes, secrets: Collection[str]) -> Answer:
    document: Any = None
    is_json = True
    if raw.strip():
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError):
            is_json = False
    retry_after_s = number(response.headers.get("retry-after")) or number(mapping(document).get("retry_after"))
    if retry_after_s is not None:
        retry_after_s = min(max(retry_after_s, 0.0), RETRY_AFTER_S_MAX)
    shown = cleaned(_explanation(document), secrets) or "no explanation"
    return Answer(response.status_code, document, is_json, shown, retry_after_s)


def _explanation(document: Any) -> str:
    """Return what says why in the forms seen: Vast's msg, a problem's detail and errors, GraphQL's errors."""
    body = mapping(document)
    errors = body.get("errors")
    said = [text(body.get(name)) for name in ("error", "msg", "message", "detail")]
    for one in errors if isinstance(errors, list) else []:
        said.append(text(mapping(one).get("message")) or text(one))
    return "; ".join(word for word in said if word)
