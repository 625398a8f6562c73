"""Is a request sent once, whatever the network and the service do, and are limits kept? Without any simulator."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest
import trio
from trio.testing import MockClock

from provisioner.core.errors import ProviderUnavailable
from provisioner.core.ports import CreateRefused, CreateUnknown, RefusedWhy
from provisioner.providers.gates import Gate
from provisioner.providers.http import BODY_BYTES_MAX, Answer, Http, cleaned
from provisioner.providers.reading import version

KEY = "key-of-the-account"
Handler = Callable[[httpx.Request], httpx.Response]


class Service:
    """Counts what it is asked."""

    def __init__(self, handler: Handler) -> None:
        self.requests: list[httpx.Request] = []
        self._handler = handler

    def http(self, **gates: Gate) -> Http:
        def answer(request: httpx.Request) -> httpx.Response:
            self.requests.append(request)
            return self._handler(request)

        return Http("vast", "https://example.com", KEY, gates, transport=httpx.MockTransport(answer))


def failing(error: type[httpx.TransportError]) -> Handler:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error(f"about {KEY}", request=request)

    return fail


async def create(http: Http, wait_s_max: float = 1.0) -> Answer | CreateRefused | CreateUnknown:
    return await http.create("/make", {"a": "ü\ud800"}, method="PUT", secrets=["s3cret"], wait_s_max=wait_s_max)


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout])
async def test_without_a_connection_nothing_was_sent(error: type[httpx.TransportError]) -> None:
    service = Service(failing(error))
    outcome = await create(service.http())
    assert isinstance(outcome, CreateRefused)
    assert outcome.why is RefusedWhy.RATE_LIMITED
    assert KEY not in outcome.message
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    "error", [httpx.ReadError, httpx.WriteError, httpx.ReadTimeout, httpx.WriteTimeout, httpx.RemoteProtocolError]
)
async def test_once_a_byte_may_have_gone_the_outcome_is_unknown(error: type[httpx.TransportError]) -> None:
    service = Service(failing(error))
    outcome = await create(service.http())
    assert isinstance(outcome, CreateUnknown)
    assert KEY not in outcome.message
    assert len(service.requests) == 1
    with pytest.raises(ProviderUnavailable) as refused:
        await service.http().ask("list", "GET", "/list")
    assert KEY not in str(refused.value)
    assert refused.value.__context__ is None, "httpx's error holds the request with its headers"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed_with_a_create(status: int) -> None:
    service = Service(lambda _: httpx.Response(status, headers={"Location": "https://elsewhere.example/"}))
    assert isinstance(await create(service.http()), CreateUnknown)
    assert [request.url.host for request in service.requests] == ["example.com"]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_nothing_is_retried(status: int) -> None:
    service = Service(lambda _: httpx.Response(status, json={}))
    outcome = await create(service.http())
    assert isinstance(outcome, CreateRefused if status == 429 else CreateUnknown)
    with pytest.raises(ProviderUnavailable):
        await service.http().ask("list", "GET", "/list")
    assert len(service.requests) == 2


async def test_a_body_without_end_is_no_answer() -> None:
    service = Service(lambda _: httpx.Response(200, content=b" " * (BODY_BYTES_MAX + 1)))
    with pytest.raises(ProviderUnavailable):
        await service.http().ask("list", "GET", "/list")


async def test_a_body_of_a_thousand_brackets_is_no_json() -> None:
    service = Service(lambda _: httpx.Response(200, content=b"[" * 100_000))
    assert isinstance(await create(service.http()), CreateUnknown)


async def test_a_gate_keeps_its_interval_and_its_order(autojump_clock: MockClock) -> None:
    gate, passed = Gate(1, 4.5), []

    async def pass_through(name: int) -> None:
        assert await gate.enter()
        passed.append((name, trio.current_time() - began_s))

    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for name in range(3):
            nursery.start_soon(pass_through, name)
            await trio.sleep(0.1)
    assert [name for name, _ in passed] == [0, 1, 2]
    assert [at for _, at in passed] == pytest.approx([0, 4.5, 9.0])
    assert not await gate.enter(wait_s_max=4.0)
    gate.close_for(60)
    assert await gate.enter()
    assert trio.current_time() - began_s == pytest.approx(69, abs=0.3)


async def test_a_gate_of_many_is_a_window(autojump_clock: MockClock) -> None:
    gate, began_s = Gate(3, 60.0), trio.current_time()
    for _ in range(7):
        await gate.enter()
    assert trio.current_time() - began_s == pytest.approx(120)


async def test_a_pause_that_was_ordered_meanwhile_holds_those_who_wait(autojump_clock: MockClock) -> None:
    gate, began_s = Gate(1, 5.0), trio.current_time()
    await gate.enter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gate.enter)
        await trio.sleep(1)
        gate.close_for(30)
    assert trio.current_time() - began_s == pytest.approx(31)


@pytest.mark.promise("P-15")
def test_a_secret_is_found_in_each_form_of_an_echo() -> None:
    secret = 'line one "quoted" ü/\nsecond-line-of-it'
    for echo in (secret, secret.splitlines()[1], json.dumps({"a": secret}), "line%20one%20%22quoted"):
        said = cleaned(f"bad: {echo}", [secret])
        assert "second-line-of-it" not in said
    assert cleaned("x" * 1000, []).startswith("xxx")
    assert len(cleaned("x" * 1000, [])) <= 301
    assert cleaned("yes we can", ["yes"]) == "yes we can", "too short to be told from a word"


def test_a_version_is_two_numbers() -> None:
    assert version("12.11") == (12, 11)
    assert version("twelve") is None
