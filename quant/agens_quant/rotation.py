"""Incoherence by block Hadamard rotation of the input: W x = (W R^T)(R x) with R orthogonal.

R is one Hadamard matrix per block of columns times random signs: outliers of a block are spread over its columns, and
the activations need log2(block) butterfly stages wherever they are produced. Folded into weights and statistics here.
Source: QuIP# (arXiv:2402.04396), QuaRot (arXiv:2404.00456).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_BLOCK = 128


def block_size(columns: int) -> int:
    """The largest power of two up to 128 that divides the number of columns."""
    return min(MAX_BLOCK, columns & -columns)


def signs(columns: int, seed: int) -> Tensor:
    """[K] float32 of +-1, fixed by the seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (columns,), generator=generator).float() * 2 - 1


def rotate_columns(x: Tensor, sign: Tensor) -> Tensor:
    """x R^T for the rows of x [..., K]; orthogonal, `unrotate_columns` is the inverse."""
    return _hadamard(x * sign)


def unrotate_columns(x: Tensor, sign: Tensor) -> Tensor:
    return _hadamard(x) * sign


def rotate_hessian(hessian: Tensor, sign: Tensor) -> Tensor:
    """R H R^T."""
    return rotate_columns(rotate_columns(hessian, sign).T, sign).T.contiguous()


def _hadamard(x: Tensor) -> Tensor:
    """Normalised Hadamard transform of each block of the last axis; its own inverse."""
    size = block_size(x.shape[-1])
    blocks = x.reshape(-1, size)
    half = 1
    while half < size:
        pairs = blocks.reshape(-1, size // (2 * half), 2, half)
        blocks = torch.cat((pairs[:, :, :1] + pairs[:, :, 1:], pairs[:, :, :1] - pairs[:, :, 1:]), 2).reshape(-1, size)
        half *= 2
    return (blocks * size**-0.5).reshape(x.shape)
