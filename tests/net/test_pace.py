"""Rates: kept on loss, cut on delay, learned on a bottleneck."""

from __future__ import annotations

import math

import numpy as np
import pytest

from net.joined import Net
from safari.errors import ConfigError
from safari.net.pace import Pacer, Pacing
from safari.net.path import Conditions

MESSAGE = np.random.default_rng(0).bytes(2000)


def upload(packets: int, up: Conditions, pacing: Pacing) -> Net:
    data = [bytes(1100) for _ in range(packets)]
    return Net.start(MESSAGE, [data], up, Conditions(delay=0.02), pacing=pacing, deadline=300).run()


def test_a_configured_rate_is_kept_to_the_millisecond():
    net = upload(100, Conditions(delay=0.02), Pacing(rate=100_000))
    story = net.stories[0]
    # 100 datagrams of 1,145 bytes; four of them at once at the start.
    assert story.sent - story.ready == pytest.approx((100 * 1145 - 4 * 1200) / 100_000, abs=0.02)


@pytest.mark.parametrize("loss", [0.0, 0.3, 0.6])
def test_loss_alone_slows_nothing_down(loss):
    net = upload(300, Conditions(delay=0.02, loss=loss), Pacing(rate=200_000))
    assert net.clients[0].channel.pacer.rate == 200_000
    assert net.stories[0].sent - net.stories[0].ready == pytest.approx(300 * 1145 / 200_000, rel=0.05)


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_a_learned_rate_comes_near_the_bottleneck_without_filling_its_queue(loss):
    bottleneck = Conditions(delay=0.02, rate=400_000, queue=1_000_000, loss=loss)
    net = upload(3000, bottleneck, Pacing())
    story, (path,) = net.stories[0], net.up
    took = story.sent - story.ready
    # What is lost before the queue does not load it.
    assert 0.7 * 400_000 / (1 - loss) < 3000 * 1145 / took < 1.2 * 400_000 / (1 - loss)
    assert path.lost / path.offered == pytest.approx(loss, abs=0.03)


def test_a_rate_above_the_bottleneck_is_cut():
    net = upload(2000, Conditions(delay=0.02, rate=100_000, queue=1e9), Pacing(rate=400_000))
    assert net.clients[0].channel.pacer.rate < 200_000


def test_steps_by_hand():
    pacer = Pacer(Pacing(start=100, least=10, most=1000, target=0.1), now=0.0)
    pacer.on_delay(1.0, 0.0, 0.05, math.inf)
    assert pacer.rate == 200
    # Within the same round trip nothing changes.
    pacer.on_delay(1.01, 0.5, 0.05, math.inf)
    assert pacer.rate == 200
    pacer.on_delay(2.0, 0.2, 0.05, math.inf)
    assert pacer.rate == 0.75 * 200
    pacer.on_delay(3.0, 0.08, 0.05, 1.0)
    assert pacer.rate == 150
    pacer.on_delay(4.0, 0.0, 0.05, 1.0)
    assert pacer.rate == 150 * 1.25
    pacer.on_delay(5.0, 0.2, 0.05, 100.0)
    assert pacer.rate == 0.75 * 100
    pacer.on_delay(6.0, 0.2, 0.05, 1.0)
    pacer.on_delay(7.0, 0.2, 0.05, 1.0)
    assert pacer.rate == 10


def test_a_round_without_any_report_halves_the_next_start():
    pacer = Pacer(Pacing(start=100_000), now=0.0)
    assert pacer.learned() == 50_000
    pacer.on_delay(1.0, 0.0, 0.05, math.inf)
    assert pacer.learned() == pacer.rate == 200_000
    assert Pacer(Pacing(rate=1000, least=10), now=0.0, rate=9999).rate == 1000


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"rate": -1}, "rate must be at least 0, got -1"),
        ({"target": 0}, "target must be above 0, got 0"),
        ({"least": 5, "most": 4}, r"least must be at most most \(4\), got 5"),
        ({"rate": float("nan")}, "rate must be at least 0, got nan"),
    ],
)
def test_wrong_rates_are_refused(wrong, problem):
    with pytest.raises(ConfigError, match=problem):
        Pacing(**wrong)
