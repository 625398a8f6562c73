"""Is every offer read the same way, whoever makes it, and is each rejection explained?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioner.core.gpus import MODELS, Gpu, gpu_of, models_of, nearest, parse_gpu
from provisioner.core.offers import Market, Offer, Price, Traffic, bid_above, with_bid
from provisioner.core.wishes import Wish, rejections, sift, why_nothing

NOW_S = 1_000_000.0
PRICES = st.floats(0.01, 50, allow_nan=False)
A100 = Gpu("A100 SXM", 80)


def offer(**changes: object) -> Offer:
    plain = Offer(
        provider="vast",
        offer_id="1",
        gpu=A100,
        gpu_count=1,
        market=Market.SPOT,
        price=Price(1.0),
        location="Sweden, SE",
        disk_gb_max=500,
        up_mbps=1000,
        down_mbps=1000,
        machine_id="m1",
        reliability=0.99,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


OFFERS = st.builds(
    lambda **changes: offer(**changes),
    provider=st.sampled_from(["vast", "runpod"]),
    offer_id=st.sampled_from("123456"),
    gpu=st.sampled_from([A100, Gpu("A100 PCIE", 40), Gpu("RTX 4090", 24)]),
    gpu_count=st.sampled_from([1, 2, 8]),
    market=st.sampled_from(Market),
    price=st.builds(Price, PRICES, st.floats(0, 0.5), st.floats(0, 0.1), st.floats(0, 0.1)),
    location=st.sampled_from(["Sweden, SE", "EU-SE-1", "Texas, US", ""]),
    disk_gb_max=st.sampled_from([10.0, 100.0, 1000.0]),
    up_mbps=st.sampled_from([None, 100.0, 1000.0]),
    reliability=st.sampled_from([None, 0.5, 0.99]),
    contract_ends_at_s=st.sampled_from([None, NOW_S + 60, NOW_S + 1e6]),
)
WISHES = st.builds(
    Wish,
    gpu=st.sampled_from([parse_gpu("A100"), parse_gpu("A100 80GB"), parse_gpu("RTX_4090")]),
    gpu_count=st.sampled_from([1, 8]),
    disk_gb=st.sampled_from([50.0, 200.0]),
    max_price_usd_gpu_h=st.sampled_from([None, 1.0, 10.0]),
    on_demand_max_usd_gpu_h=st.sampled_from([None, 2.5, 20.0]),
    spot=st.booleans(),
    regions=st.sampled_from([(), ("se",), ("US", "SE")]),
    up_mbps_min=st.sampled_from([0.0, 500.0]),
    reliability_min=st.sampled_from([0.0, 0.9]),
    lasts_s_min=st.sampled_from([0.0, 3600.0]),
    traffic=st.builds(Traffic, st.floats(0, 100), st.floats(0, 100)),
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.name} {model.memory_gb}")
def test_both_providers_words_mean_one_model(model: object) -> None:
    for spelled in (model.vast, model.runpod):  # type: ignore[attr-defined]
        if spelled:
            gpu = gpu_of(spelled, model.memory_gb * 1.02)  # type: ignore[attr-defined]
            assert gpu == Gpu(model.name, model.memory_gb)  # type: ignore[attr-defined]
            assert gpu_of(gpu.name, gpu.memory_gb) == gpu


def test_a_model_that_no_table_has_keeps_its_own_words() -> None:
    assert gpu_of("NVIDIA  RTX PRO 9000 Blackwell", 96) == Gpu("RTX PRO 9000 BLACKWELL", 96)
    assert parse_gpu("rtx pro 9000").means(gpu_of("RTX PRO 9000 Blackwell", 96))


@pytest.mark.parametrize(
    ("wish", "name", "memory_gb", "meant"),
    [
        ("A100", "A100 PCIE", 40, True),
        ("A100 80GB", "A100 SXM4", 40.5, False),
        ("A100 80GB", "NVIDIA A100 80GB PCIe", 80, True),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 80, True),
        ("NVIDIA H100 80GB HBM3", "H100 PCIE", 80, False),
        ("rtx_4090", "NVIDIA GeForce RTX 4090", 24, True),
        ("L40", "L40S", 48, False),
    ],
)
def test_a_wish_means(wish: str, name: str, memory_gb: float, meant: bool) -> None:
    assert parse_gpu(wish).means(gpu_of(name, memory_gb)) is meant


def test_a_wrong_name_brings_the_nearest() -> None:
    assert not models_of(parse_gpu("A1000"))
    assert any("A100" in name for name in nearest(parse_gpu("A1000"), frozenset()))
    assert [model.memory_gb for model in models_of(parse_gpu("A100 SXM 40GB"))] == [40]


@given(PRICES, st.floats(1, 3))
def test_a_bid_is_never_below_what_it_must_beat(least: float, factor: float) -> None:
    bid = bid_above(least, factor)
    assert bid >= least * factor - 1e-5
    assert bid <= least * factor + 0.002


def test_a_bid_of_ours_is_raised_to_the_minimum() -> None:
    spot = offer(min_bid_usd_h=2.0, price=Price(0.0))
    assert with_bid(spot).price.compute_usd_h == 2.3
    assert with_bid(spot, 1.0).price.compute_usd_h == 2.0
    assert with_bid(offer(market=Market.ON_DEMAND), 9.0).price.compute_usd_h == 1.0


def test_prices_are_per_gpu_and_all_in() -> None:
    eight = offer(gpu_count=8, price=Price(8.0, 0.72, 0.01, 0.0))
    assert eight.usd_gpu_h(disk_gb=1000, traffic=Traffic(up_gb_h=100)) == pytest.approx((8 + 1 + 1) / 8)
    wish = Wish(parse_gpu("A100"), gpu_count=8, disk_gb=100, max_price_usd_gpu_h=1.0)
    assert [r.option for r in rejections(eight, wish, NOW_S)] == ["--max-price"]


@given(OFFERS, WISHES)
def test_an_accepted_offer_keeps_every_cap(one: Offer, wish: Wish) -> None:
    sifted = sift([one], wish, NOW_S)
    if not sifted.accepted:
        [(_, reasons)] = sifted.rejected
        assert reasons
        assert all(reason.text and reason.option for reason in reasons)
        return
    cap = wish.cap_usd_gpu_h(one.market)
    assert one.market is Market.ON_DEMAND or cap is None or one.usd_gpu_h(wish.disk_gb, wish.traffic) <= cap
    if one.market is Market.ON_DEMAND:
        assert cap is not None
        assert one.usd_gpu_h(wish.disk_gb, wish.traffic) <= cap
    assert wish.gpu.means(one.gpu)
    assert one.gpu_count == wish.gpu_count
    assert one.disk_gb_max >= wish.disk_gb


@given(st.lists(OFFERS, max_size=12), WISHES)
def test_every_offer_is_accepted_or_explained(offers: list[Offer], wish: Wish) -> None:
    sifted = sift(offers, wish, NOW_S)
    seen = {one.key for one in sifted.accepted} | {one.key for one, _ in sifted.rejected}
    assert seen == {one.key for one in offers}
    assert len(sifted.accepted) + len(sifted.rejected) == len(seen)
    assert bool(why_nothing(sifted, wish)) is not bool(sifted.accepted)


@pytest.mark.parametrize("price", [float("nan"), -1.0])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    wish = Wish(parse_gpu("A100"))
    assert [r.option for r in rejections(offer(price=Price(price)), wish, NOW_S)] == ["price"]


def test_the_filter_that_excludes_everything_is_named() -> None:
    offers = [offer(offer_id="1", up_mbps=100), offer(offer_id="2", up_mbps=200, price=Price(3.0))]
    wish = Wish(parse_gpu("A100"), max_price_usd_gpu_h=2.0, up_mbps_min=2000)
    lines = why_nothing(sift(offers, wish, NOW_S), wish)
    assert lines == (
        "1 offers fail only --min-up, e.g. one of vast uploads 100 Mbit/s, wanted 2000",
        "--min-up excludes every one of 2 offers",
    )


def test_nothing_offered_says_the_nearest_names() -> None:
    wish = Wish(parse_gpu("H10"))
    assert "H100" in why_nothing(sift([], wish, NOW_S), wish)[0]
    assert "nearest names" in why_nothing(sift([offer()], wish, NOW_S), wish)[0]
