"""Bodies in the store: what is written is read back, and what is not understood is an error of its own."""

from __future__ import annotations

import json

import pytest

from provisioner.core.errors import BadWish, LedgerCorrupt
from provisioner.core.gpus import GpuWish, parse_gpu
from provisioner.core.happenings import Failover, decode_failover, encode_failover
from provisioner.core.jobs import JobSpec, Limits, decode_spec, encode_spec
from provisioner.core.offers import Traffic
from provisioner.core.rendezvous import (
    BadMessage,
    Controller,
    NodePhase,
    Orders,
    Report,
    controller_key,
    decode,
    encode,
    read_controller_epoch,
)
from provisioner.core.wishes import Wish


def spec() -> JobSpec:
    wish = Wish(
        parse_gpu("A100 80GB"),
        disk_gb=200,
        max_price_usd_gpu_h=1.2,
        regions=("EU", "US"),
        cuda_min=(12, 1),
        traffic=Traffic(3.0, 1.0),
    )
    limits = Limits(budget_usd=200.0, keep_lost_s=1800)
    return JobSpec("llama", "llama.v2", ("python", "train.py"), ("vast", "runpod"), wish, limits=limits)


def test_a_spec_is_read_back_as_it_was() -> None:
    assert decode_spec(encode_spec(spec())) == spec()


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"version": 1}', b'{"version": 2}', b"\xff"])
def test_a_spec_that_is_not_understood_is_no_spec(raw: bytes) -> None:
    with pytest.raises(BadWish):
        decode_spec(raw)


@pytest.mark.parametrize(
    "body",
    [
        Report("00c0ffee-1", 3, NodePhase.RUNNING, "i-1", exit_code=None, writer_epoch=4, checks={"gpu": "A100"}),
        Report("00c0ffee-1", 9, NodePhase.ENDED, exit_code=137, times={"ended": 1.5}),
        Orders(2, 7, permit_writer_epoch=5),
        Controller(3, "host", 17, 1.0, seq=4),
    ],
)
def test_a_message_is_read_back_as_it_was(body: Report | Orders | Controller) -> None:
    found: Report | Orders | Controller
    match body:
        case Report():
            found = decode(Report, encode(body))
        case Orders():
            found = decode(Orders, encode(body))
        case Controller():
            found = decode(Controller, encode(body))
    assert found == body


def test_a_message_of_another_kind_or_version_is_refused() -> None:
    orders = encode(Orders(1, 1))
    newer = json.dumps({**json.loads(orders), "version": 2}).encode()
    unknown = json.dumps({**json.loads(orders), "self_repair": True}).encode()
    for raw in (b"", b"null", b"[1]", newer, unknown, encode(Controller(1, "h", 1, 0.0))):
        with pytest.raises(BadMessage):
            decode(Orders, raw)


def test_the_number_of_a_controller_is_read_from_its_key_alone() -> None:
    assert read_controller_epoch(controller_key("a-job", 12)) == 12
    assert read_controller_epoch("jobs/a-job/controllers/alive") is None


def test_a_failover_is_read_back_as_it_was() -> None:
    failover = Failover(1, "loss", "its heartbeat stands still", 10.0, 24.0, winner="00c0ffee-2", notes=("a", "b"))
    assert decode_failover(encode_failover(failover)) == failover
    with pytest.raises(LedgerCorrupt):
        decode_failover(b'{"version": 1, "speed": 3}')


def test_parse_gpues_survive_json() -> None:
    wish = decode_spec(encode_spec(spec())).wish
    assert isinstance(wish.gpu, GpuWish)
    assert tuple(wish.gpu.words) == parse_gpu("A100 80GB").words
