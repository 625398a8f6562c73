"""Does the ledger's record survive, and does it refuse what cannot be?"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.core.errors import BadWish, LedgerCorrupt
from provisioner.core.intents import (
    TRANSITIONS,
    Intent,
    IntentRecord,
    IntentState,
    advanced,
    decode,
    encode,
    label_of,
    parse_label,
)
from provisioner.core.offers import Market

TEXT = st.text(max_size=20)
MONEY = st.floats(0, 1000, allow_nan=False)
INTENTS = st.builds(
    Intent,
    ident=TEXT,
    label=TEXT,
    provider=TEXT,
    offer_id=TEXT,
    market=st.sampled_from(Market),
    gpu=TEXT,
    gpu_count=st.integers(0, 16),
    location=TEXT,
    machine_id=st.none() | TEXT,
    usd_h=MONEY,
    compute_usd_h=MONEY,
    written_at_s=MONEY,
)
RECORDS = st.builds(
    IntentRecord,
    INTENTS,
    st.sampled_from(IntentState),
    MONEY,
    st.lists(TEXT, max_size=3).map(tuple),
    TEXT,
    st.none() | st.integers(1, 10**6),
    st.none() | MONEY,
)
PLAIN = Intent("00c0ffee-1", "sw-j-00c0ffee-1", "vast", "7", Market.SPOT, "L4 24GB", 1, "SE", None, 0.5, 0.4, 1.0)
JOBS = st.from_regex(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?", fullmatch=True)


@given(RECORDS)
def test_a_record_survives_its_encoding(record: IntentRecord) -> None:
    assert decode(encode(record)) == record
    assert encode(decode(encode(record))) == encode(record)


def test_the_bytes_of_version_1_stay_readable() -> None:
    body = (
        b'{"at_s":2.0,"instances":["i1"],"intent":{"compute_usd_h":0.4,"gpu":"L4 24GB","gpu_count":1,'
        b'"ident":"00c0ffee-1","label":"sw-j-00c0ffee-1","location":"SE","machine_id":null,"market":"spot",'
        b'"offer_id":"7","provider":"vast","usd_h":0.5,"written_at_s":1.0},"permitted_writer_epoch":null,'
        b'"state":"rented","version":1,"why":"","won_at_s":null}'
    )
    record = IntentRecord(PLAIN, IntentState.RENTED, 2.0, ("i1",))
    assert encode(record) == body
    assert decode(body) == record


def changed(**changes: object) -> bytes:
    return json.dumps({**json.loads(encode(IntentRecord(PLAIN, IntentState.RENTED, 2.0))), **changes}).encode()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "cannot be read"),
        (b"[]", "cannot be read"),
        (b'{"version":1}', "not what version 1 says"),
        (changed(version=2), "has version 2, this program reads 1"),
        (changed(state="bought"), "not what version 1 says"),
        (changed(surprise=1), "not what version 1 says"),
        (changed(intent={"ident": "x"}), "not what version 1 says"),
    ],
)
def test_what_is_no_record_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(LedgerCorrupt, match=says):
        decode(body)


@given(JOBS, st.integers(0, 2**32 - 1), st.integers(1, 999_999))
def test_a_label_says_whose_it_is(job: str, race: int, serial: int) -> None:
    label = label_of(job, f"{race:08x}", serial)
    assert parse_label(f" {label}\n") == (job, f"{race:08x}-{serial}")
    assert len(label) <= 191


@pytest.mark.parametrize("job", ["", "-a", "a-", "A", "a b", "x" * 101, "j/k"])
def test_a_job_name_that_cannot_be_a_label_is_refused(job: str) -> None:
    with pytest.raises(BadWish, match="job name"):
        label_of(job, "00c0ffee", 1)


@pytest.mark.parametrize("label", ["", "sw-", "sw-j-xyz-1", "prod", "sw-j-00c0ffee-1-extra", "xsw-j-00c0ffee-1"])
def test_other_peoples_labels_are_not_ours(label: str) -> None:
    assert parse_label(label) is None


@pytest.mark.parametrize("state", IntentState)
def test_only_the_pictures_moves_are_possible(state: IntentState) -> None:
    record = IntentRecord(PLAIN, state, 1.0, ("i2",))
    for to in IntentState:
        if to is state or to in TRANSITIONS[state]:
            moved = advanced(record, to, 2.0, instances=("i1",))
            assert (moved.state, moved.instances, moved.at_s) == (to, ("i1", "i2"), 2.0)
        else:
            with pytest.raises(AssertionError, match="cannot become"):
                advanced(record, to, 2.0)


def test_every_state_can_end_and_a_winner_may_be_lost() -> None:
    for state in IntentState:
        reached, found = {state}, {state}
        while found:
            found = {to for one in found for to in TRANSITIONS[one]} - reached
            reached |= found
        assert IntentState.GONE in reached
    assert replace(IntentRecord(PLAIN, IntentState.KEPT, 1.0)).settled is False
