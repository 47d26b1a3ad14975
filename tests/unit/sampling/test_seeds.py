"""Random streams: a function of seed and position only (cases H8, I3)."""

from __future__ import annotations

import numpy as np
import pytest

from agens_engine.sampling.seeds import Lane, RequestStream


def test_h8_numbers_do_not_depend_on_how_they_are_asked_for():
    one = RequestStream(42).uniforms(0, 300, Lane.DRAW)
    stream = RequestStream(42)
    backwards = [stream.uniform(i, Lane.DRAW) for i in reversed(range(300))]
    assert backwards[::-1] == one.tolist()
    assert stream.uniforms(60, 8, Lane.DRAW).tolist() == one[60:68].tolist()


def test_h8_neighbouring_seeds_and_lanes_are_unrelated():
    streams = [RequestStream(seed).uniforms(0, 20_000, lane) for seed in (0, 1, 2, -1) for lane in Lane]
    correlation = np.corrcoef(np.array(streams)) - np.eye(len(streams))
    assert np.abs(correlation).max() < 6 / np.sqrt(20_000)


def test_h8_interleaved_requests_do_not_disturb_each_other():
    alone = [RequestStream(seed).uniforms(0, 100, Lane.DRAW).tolist() for seed in (5, 6)]
    a, b = RequestStream(5), RequestStream(6)
    mixed = [
        (a.uniform(i, Lane.DRAW), RequestStream(None).uniform(i, Lane.DRAW), b.uniform(i, Lane.DRAW))
        for i in range(100)
    ]
    assert [[m[0] for m in mixed], [m[2] for m in mixed]] == alone


def test_i3_without_a_seed_every_request_differs():
    firsts = {RequestStream(None).uniform(0, Lane.DRAW) for _ in range(50)}
    assert len(firsts) == 50


def test_uniform_in_mean_and_range():
    numbers = RequestStream(7).uniforms(0, 50_000, Lane.ACCEPT)
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 6 * np.sqrt(1 / 12 / 50_000)


@pytest.mark.parametrize("seed", [0, -5, 2**63, 2**200])
def test_any_integer_is_a_seed(seed):
    assert RequestStream(seed).uniform(3, Lane.DRAW) == RequestStream(seed).uniform(3, Lane.DRAW)
