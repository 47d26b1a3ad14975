"""A rounded tensor as the parts of a 4-bit container, and how many bits it takes, everything included.

Codes are indices into a set of 4-bit codes; the container stores the 4-bit codes themselves, so any reader of
compressed-tensors gives the same weights, and an engine that looks at the set of codes stores 2 or 3 bits.

Bits    index bits per weight, 16 per group scale, 8 per entry of the table of a 2- or 3-bit tensor
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agens_quant.code_sets import choose_bits, tensor_mask
from agens_quant.compressed_tensors import PackedLayout, pack_codes, unpack_codes
from agens_quant.gptq import Rounded

SCALE_BITS = 16
_CENTRE = 8


def stored_bits(n: int, k: int, bits: int, num_groups: int) -> int:
    """Bits of an [N, K] tensor at 2, 3 or 4 bits with G groups a row; 16 is a tensor left in bf16."""
    if bits >= 16:
        return n * k * bits
    return n * k * bits + n * num_groups * SCALE_BITS + (8 << bits if bits < 4 else 0)


def container_parts(rounded: Rounded) -> dict[str, Tensor]:
    """weight_packed, weight_scale (fp16) and weight_shape; the levels must be integers in -8 .. 7."""
    levels = rounded.levels.round().to(torch.int64)
    assert torch.equal(levels.float(), rounded.levels) and int(levels.min()) >= -8 and int(levels.max()) <= 7
    codes = (levels + _CENTRE)[rounded.codes.long()].to(torch.uint8).numpy()
    return {
        "weight_packed": torch.from_numpy(pack_codes(codes, 4)),
        "weight_scale": rounded.scales.to(torch.float16),
        "weight_shape": torch.tensor(list(rounded.codes.shape), dtype=torch.int64),
    }


def container_bits(layout: PackedLayout, packed: Tensor) -> int:
    """Bits per code that the codes of a container really need: 2, 3 or 4 (8 for an 8-bit container)."""
    if layout.bits != 4:
        return layout.bits
    words = packed.contiguous().numpy().view(np.uint32)
    if layout.in_features % 8:  # rows end in padding, whose code 0 is not part of the set
        codes = unpack_codes(words.view(np.int32), 4, layout.in_features)
        mask = int(np.bitwise_or.reduce(1 << np.unique(codes).astype(np.int64)))
    else:
        mask = tensor_mask(words)
    return choose_bits(mask)
