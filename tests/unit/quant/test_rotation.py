"""The block Hadamard rotation is orthogonal and keeps what a linear computes."""

from __future__ import annotations

import pytest
import torch

from agens_quant.rotation import block_size, rotate_columns, rotate_hessian, signs, unrotate_columns


@pytest.mark.parametrize(("columns", "block"), [(576, 64), (1536, 128), (192, 64), (48, 16), (7, 1)])
def test_rotation_is_orthogonal(columns: int, block: int) -> None:
    assert block_size(columns) == block
    g = torch.Generator().manual_seed(0)
    w, x, sign = torch.randn(5, columns, generator=g), torch.randn(9, columns, generator=g), signs(columns, 3)
    turned = rotate_columns(w, sign)
    assert torch.allclose(unrotate_columns(turned, sign), w, atol=1e-5)
    assert torch.allclose(rotate_columns(x, sign) @ turned.T, x @ w.T, atol=1e-4)
    h = x.T @ x
    y = rotate_columns(x, sign)
    assert torch.allclose(rotate_hessian(h, sign), y.T @ y, atol=1e-3)


def test_outliers_are_spread_over_their_block_only() -> None:
    x = torch.zeros(1, 128 * 3)
    x[0, 130] = 1.0
    y = rotate_columns(x, signs(128 * 3, 0))
    assert torch.allclose(y[0, 128:256].abs(), torch.full((128,), 128**-0.5))
    assert float(y[0, :128].abs().max()) == 0 and float(y[0, 256:].abs().max()) == 0


def test_signs_follow_the_seed() -> None:
    assert torch.equal(signs(64, 1), signs(64, 1)) and not torch.equal(signs(64, 1), signs(64, 2))
