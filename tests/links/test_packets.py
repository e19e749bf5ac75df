"""Packet-level links: shares, bursts, queues and deadlines, and what counts as recovered."""

from __future__ import annotations

import numpy as np
import pytest

from safari.errors import ConfigError
from safari.links.link import Setting
from safari.links.packets import lossy as packets
from safari.links.packets import lost_packets, queue_delays, recovered


def setting(clients: int) -> Setting:
    return Setting(clients, np.zeros((clients, 2), np.int64), np.random.default_rng(0))


def draw(link, counts, rounds: int = 1, seed: int = 0):
    counts = np.asarray(counts)
    state = link.init(setting(len(counts)))
    out = []
    for t in range(rounds):
        delivered, state = link.apply(state, t, counts, np.random.default_rng([seed, t]))
        out.append(delivered)
    return out


def runs_of_loss(lost: np.ndarray) -> float:
    """How many in a row are lost, on average."""
    starts = lost & ~np.concatenate([[False], lost[:-1]])
    return lost.sum() / max(1, starts.sum())


@pytest.mark.parametrize("loss", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("burst", [1.0, 10.0])
def test_the_share_and_the_length_of_bursts_are_those_asked_for(loss, burst):
    (delivered,) = draw(packets(loss=loss, burst=burst), [40_000])
    lost = ~delivered[0]
    assert lost.mean() == pytest.approx(loss, abs=0.025)
    if 0 < loss < 1:
        expected = burst if burst > 1 else 1 / (1 - loss)
        assert runs_of_loss(lost) == pytest.approx(expected, rel=0.2)


def test_a_list_of_losses_is_repeated_and_one_uplink_can_be_cut():
    (delivered,) = draw(packets(loss=[0.0, 1.0]), [50, 60, 70, 80])
    assert [len(d) for d in delivered] == [50, 60, 70, 80]
    assert [bool(d.all()) for d in delivered] == [True, False, True, False]
    assert not delivered[1].any()


def test_draws_depend_on_the_client_and_the_round_alone():
    link = packets(loss=0.4, burst=3)
    few, many = draw(link, [30, 40], 2), draw(link, [30, 45, 50], 2)
    assert all((a[0] == b[0]).all() for a, b in zip(few, many, strict=True))
    assert (few[0][1] == many[0][1][:40]).all()
    assert (few[0][0] != few[1][0]).any()


def test_a_queue_by_hand():
    # One packet a second; one every quarter of a second comes; the queue holds one and a half.
    assert queue_delays(5, 1000, 1000.0, 1500.0, 4000.0).tolist() == [1.0, 2.0, 3.0, np.inf, np.inf]
    assert queue_delays(3, 1000, 500.0, 0.0, 0.0).tolist() == [2.0, 4.0, 6.0]


def test_what_comes_after_the_deadline_is_lost_and_not_always_the_same():
    link = packets(loss=0.0, rate=100_000, latency=0.1, deadline=0.505, size=1000)
    found = np.array([delivered[0] for delivered in draw(link, [100], 200)])
    # 0.4 s at 100 packets a second.
    assert (found.sum(1) == 40).all()
    assert found.mean(0).max() < 0.6
    (late,) = draw(packets(latency=2.0, deadline=1.0, loss=0.0), [5])
    assert not late[0].any()


def test_rates_vary_around_their_mean():
    link = packets(loss=0.0, rate=100_000, spread_of_rates=0.5, deadline=0.5, size=1000)
    came = [delivered[0].sum() for delivered in draw(link, [1000], 400)]
    assert np.mean(came) == pytest.approx(50, rel=0.1)
    assert np.std(came) > 15


@pytest.mark.parametrize(
    ("through", "count", "recover", "expected"),
    [
        ([1, 1, 0], 3, "blocks", [1, 1, 0]),
        ([1, 1, 0], 3, "whole", [0, 0, 0]),
        ([1, 1, 1], 3, "whole", [1, 1, 1]),
        ([1, 1, 0, 1], 3, "fec", [1, 1, 1]),
        ([1, 0, 0, 1], 3, "fec", [0, 0, 0]),
    ],
)
def test_what_counts(through, count, recover, expected):
    assert recovered(np.array(through, bool), count, recover).astype(int).tolist() == expected


def test_repair_is_sent_with_fec_alone():
    link = packets(loss=0.2, recover="fec", repair=0.5)
    assert link.sent(100) == 150
    whole = np.array([d[0].all() for d in draw(link, [100], 200)])
    # 150 packets of which 80% arrive: 120 ± 5, and 100 are enough.
    assert whole.mean() > 0.99
    assert packets().sent(100) == 100


def test_five_percent_of_packets_lose_nearly_every_model_of_160():
    whole = np.array([d[0].all() for d in draw(packets(loss=0.05, recover="whole"), [160], 3000)])
    assert whole.mean() < 0.003
    parts = np.array([d[0].mean() for d in draw(packets(loss=0.05), [160], 300)])
    assert parts.mean() == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"loss": 1.2}, "loss must lie between 0 and 1, got 1.2"),
        ({"burst": 0.5}, "burst must be at least 1, got 0.5"),
        ({"loss": 0.9, "burst": 4}, "loss must be at most 0.8 in bursts of 4, got 0.9"),
        ({"rate": -1}, r"rate must be at least 0 and finite, got \[-1.0\]"),
        ({"rate": float("inf")}, r"rate must be at least 0 and finite, got \[inf\]"),
        ({"spread_of_rates": 60.0}, "spread_of_rates must be at most 10, got 60.0"),
        ({"recover": "block"}, "recover must be one of blocks, fec, whole; got 'block'"),
        ({"repair": 0.5}, "repair must lie between 0 and 1000, and be 0 unless recover is fec; got 0.5"),
        ({"repair": float("inf"), "recover": "fec"}, "repair must lie between 0 and 1000, .* got inf"),
        ({"deadline": float("nan")}, "deadline must be at least 0, got nan"),
        ({"size": 0}, "size must lie between 100 and 65000, got 0"),
    ],
)
def test_wrong_options_are_refused(options, problem):
    with pytest.raises(ConfigError, match=problem):
        packets(**options)


def test_a_list_of_rates_must_fit_the_clients():
    with pytest.raises(
        ConfigError, match="rate must hold one number or a list whose length divides the 3 cl"
    ):
        packets(rate=[1, 2]).init(setting(3))


def test_bursts_are_seeded():
    assert (
        lost_packets(50, 0.3, 5, np.random.default_rng(3))
        == lost_packets(50, 0.3, 5, np.random.default_rng(3))
    ).all()
