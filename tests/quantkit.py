"""Compressed-tensors linears of any shape for tests, with their codes at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agens_quant.compressed_tensors import Encoding, PackedLayout, dequantize, infer_layout, pack_codes


@dataclass(frozen=True)
class Linear:
    layout: PackedLayout
    parts: dict[str, torch.Tensor]
    codes: np.ndarray

    def decoded(self) -> np.ndarray:
        """The container's own decode, float32: what every repack is compared with."""
        part = self.parts
        return dequantize(
            self.layout,
            part["weight_packed"],
            part["weight_scale"],
            part.get("weight_zero_point"),
            part.get("weight_g_idx"),
        ).numpy()


def linear_of(
    codes: np.ndarray,
    *,
    group: int = 128,
    bits: int = 4,
    encoding: Encoding = "padded",
    zeros: bool = False,
    g_idx: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Linear:
    """A linear that stores these codes [N, K]; scales (of either sign), zero points and group order are random."""
    rng = np.random.default_rng(seed)
    n, k = codes.shape
    groups = -(-k // group)
    scales = rng.choice([-1.0, 1.0], (n, groups)) * rng.uniform(1e-3, 0.1, (n, groups))
    parts = {
        "weight_packed": torch.from_numpy(pack_codes(codes, bits, encoding)),
        "weight_scale": torch.from_numpy(scales.astype(np.float32)).to(scale_dtype),
    }
    if zeros:
        drawn = rng.integers(0, 1 << bits, (groups, n))
        parts["weight_zero_point"] = torch.from_numpy(np.ascontiguousarray(pack_codes(drawn, bits, encoding).T))
    if g_idx:
        parts["weight_g_idx"] = torch.from_numpy(rng.permutation(np.arange(k) // group).astype(np.int32))
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    layout = infer_layout((n, k), shapes, bits_hint=bits, group_size_hint=group)
    return Linear(layout, parts, codes)


def random_codes(n: int, k: int, allowed: Sequence[int], seed: int = 0) -> np.ndarray:
    """[n, k] uint8 drawn from `allowed`, each of them present where there is room."""
    codes = np.random.default_rng(seed).choice(np.array(allowed, np.uint8), (n, k))
    flat = codes.reshape(-1)
    flat[: len(allowed)] = np.array(allowed, np.uint8)[: flat.size]
    return codes
