"""ggml's own quantise function, called through ctypes, for types that people know.

Build the library once from the source distribution of llama-cpp-python (see eval_quant_real_model.py). Rows of 576 do
not divide into blocks of 256, so a matrix is handed over as one long row, importance repeated for every row.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# ggml_type numbers and bits per weight
TYPES = {"Q2_K": (10, 2.625), "Q3_K": (11, 3.4375), "IQ3_S": (21, 3.4375), "IQ4_XS": (23, 4.25), "Q4_K": (12, 4.5)}


class Ggml:
    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.ggml_quantize_init.argtypes = [ctypes.c_int]
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
        self._lib.ggml_quantize_chunk.restype = ctypes.c_size_t

    def round_trip(self, weight: Tensor, importance: Tensor, name: str) -> Tensor:
        """[N, K] float32 -> the same after ggml's rounding with an importance [K] per column."""
        from gguf import GGMLQuantizationType, dequantize

        number, bits = TYPES[name]
        self._lib.ggml_quantize_init(number)
        n, k = weight.shape
        source = np.ascontiguousarray(weight.numpy(), np.float32)
        energy = np.ascontiguousarray(np.tile(importance.numpy().astype(np.float32), n))
        packed = np.zeros(round(n * k * bits / 8), np.uint8)
        used = self._lib.ggml_quantize_chunk(
            number, source.ctypes.data, packed.ctypes.data, 0, 1, n * k, energy.ctypes.data
        )
        if used != packed.nbytes:
            raise ValueError(f"{name} took {used} bytes, expected {packed.nbytes}")
        return torch.from_numpy(dequantize(packed, GGMLQuantizationType(number)).reshape(n, k).copy())
