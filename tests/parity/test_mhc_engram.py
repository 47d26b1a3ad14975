"""Sinkhorn and Engram rows against the numbers of the specification (volundr-model.md sections 8 and 12)."""

from __future__ import annotations

import pytest
import torch

from agens_kernels.ref import engram, mhc

LOGITS = torch.tensor(
    [[1, 0, -1, 0.5], [0, 2, 0, -0.5], [0.25, 0, 1.5, 0], [-2, 0, 0, 3]], dtype=torch.float64
)


def test_sinkhorn_of_the_specification() -> None:
    expected = torch.tensor(
        [
            [0.64083778, 0.14772016, 0.08364481, 0.12799963],
            [0.14723958, 0.68171004, 0.14200527, 0.02940933],
            [0.19570966, 0.09550471, 0.65881008, 0.05019338],
            [0.01621298, 0.07506510, 0.11553984, 0.79239766],
        ],
        dtype=torch.float64,
    )
    assert torch.allclose(mhc.sinkhorn(LOGITS[None], 10)[0], expected, atol=1e-8)
    first_row = torch.tensor([0.63582744, 0.16035970, 0.08158098, 0.20819858], dtype=torch.float64)
    assert torch.allclose(mhc.sinkhorn(LOGITS[None], 1)[0, 0], first_row, atol=1e-8)


def test_sinkhorn_columns_are_exact_and_inputs_independent() -> None:
    gen = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(50, 4, 4, generator=gen)
    out = mhc.sinkhorn(logits, 10)
    assert torch.allclose(out.sum(1), torch.ones(50, 4), atol=1e-6)
    assert torch.equal(out[7:8], mhc.sinkhorn(logits[7:8], 10))


def test_mix_and_combine_by_definition() -> None:
    gen = torch.Generator().manual_seed(1)
    streams, weight = torch.randn(3, 4, 6, generator=gen), torch.randn(24, 6, generator=gen)
    norm = torch.rand(6, generator=gen)
    statics = (torch.randn(4, generator=gen), torch.randn(4, generator=gen), torch.randn(4, 4, generator=gen))
    x, post, res = mhc.mix(streams, weight, norm, statics, iters=10, eps=1e-6)
    mean = streams.mean(1)
    dyn = (mean / (mean.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm) @ weight.T
    weights = (statics[0] + dyn[:, :4]).unsqueeze(-1)
    assert torch.allclose(x, (weights * streams).sum(1), atol=1e-5)
    assert torch.allclose(post, statics[1] + dyn[:, 4:8], atol=1e-5)
    delta = torch.randn(3, 6, generator=gen)
    out = mhc.combine(streams, res, post, delta)
    for a in range(4):
        expected = (res[:, a, :, None] * streams).sum(1) + post[:, a, None] * delta
        assert torch.allclose(out[:, a], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("ids", "order2", "order3"),
    [
        ([5, 7, 9, 11], [6, 757326, 660242, 563158], [6, 757350, 82128, 141862]),
        ([248056] * 3, [248057, 663890, 663890], [248057, 607542, 528979]),
        ([151643, 248044, 0, 248076], [151644, 1045449, 998350, 199534], [151644, 603449, 786510, 228691]),
    ],
)
def test_engram_rows_of_the_specification(ids: list[int], order2: list[int], order3: list[int]) -> None:
    previous = torch.full((1, 2), -1)
    rows = engram.rows(torch.tensor([ids]), previous, (2, 3), 1 << 20)
    assert rows[:, 0].tolist() == [order2, order3]


def test_engram_rows_do_not_depend_on_the_cut() -> None:
    ids = [9, 4, 4, 0, 17, 3, 3]
    whole = engram.rows(torch.tensor([ids]), torch.full((1, 4), -1), (2, 3, 5), 1021)
    for cut in range(1, len(ids)):
        previous = ([-1] * 4 + ids[:cut])[-4:]
        part = engram.rows(torch.tensor([ids[cut:]]), torch.tensor([previous]), (2, 3, 5), 1021)
        assert torch.equal(part, whole[:, :, cut:]), cut


def test_engram_high_orders_wrap_as_64_bit_arithmetic() -> None:
    ids, rows = [248076] * 6, 1 << 20
    code = 0
    for j, token in enumerate(ids):
        code = (code * engram.PRIMES[j % 5] + token + 1) & engram.MASK
    out = engram.rows(torch.tensor([ids]), torch.full((1, 5), -1), (6,), rows)
    assert out[0, 0, -1].item() == code % rows
