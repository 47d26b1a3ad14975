"""The quality figures against their definitions, whatever the pieces the rows come in."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from agens_quant.report import QualityMeter


def test_figures_equal_their_definitions() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, 11, generator=g) * 2, torch.randn(40, 11, generator=g) * 2
    ids = torch.randint(0, 11, (40,), generator=g)
    whole, pieces = QualityMeter(), QualityMeter()
    whole.add(a, b, ids[1:])
    for start in range(0, 40, 7):
        pieces.add(a[start : start + 7], b[start : start + 7], ids[start + 1 : start + 8])
    p, q = a.softmax(-1).double(), b.softmax(-1).double()
    kl = (p * (p.log() - q.log())).sum(-1)
    for result in (whole.result(), pieces.result()):
        assert result.mean_kl == pytest.approx(float(kl.mean()), rel=1e-5)
        assert result.p99_kl == pytest.approx(float(torch.quantile(kl, 0.99)), rel=1e-4)
        assert result.top1_agreement == float((a.argmax(-1) == b.argmax(-1)).double().mean())
        ratio = math.exp(float(F.cross_entropy(b[:-1], ids[1:]) - F.cross_entropy(a[:-1], ids[1:])))
        assert result.perplexity_ratio == pytest.approx(ratio, rel=1e-5)
        assert result.tokens == 40


def test_the_same_model_is_perfect_and_nonsense_is_refused() -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    meter = QualityMeter()
    meter.add(x, x.clone(), torch.tensor([1, 2, 3, 4]))
    result = meter.result()
    assert result.mean_kl == pytest.approx(0, abs=1e-9) and result.top1_agreement == 1
    assert result.perplexity_ratio == pytest.approx(1)
    with pytest.raises(ValueError, match="finite"):
        meter.add(x, x * float("nan"), torch.tensor([1]))
    with pytest.raises(ValueError, match="no token"):
        QualityMeter().result()
