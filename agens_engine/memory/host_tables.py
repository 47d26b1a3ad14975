"""Tables that are read a few rows at a time: token embedding and Engram tables, in host memory or mapped from disk.

They keep the type they are stored in (bf16: half the bytes of what is computed with); only gathered rows are widened,
which is exact. The rows of a step are known before it runs: the ids of drafts are known when the drafts are.

    mapped    a view of the checkpoint's file; the system keeps what is read often in its page cache
    ram       a copy; with an accelerator page-locked in pieces, as far as the limits allow

Page-locking is not measured on a GPU.
Test: tests/unit/memory/test_host_tables.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

PIN_PIECE_BYTES = 256 << 20

# (address, bytes) -> whether the driver locked them
Register = Callable[[int, int], bool]


def gather_rows(table: torch.Tensor, index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rows of a table [N, D] of any floating type: index [...] int64 -> [..., D] on `like`'s device, in its type.

    Differentiable in the table.
    """
    return F.embedding(index.to(table.device), table).to(device=like.device, dtype=like.dtype)


@dataclass(frozen=True)
class Pinned:
    """How much of a table is page-locked."""

    table_bytes: int
    pinned_bytes: int

    def __str__(self) -> str:
        if self.pinned_bytes == self.table_bytes:
            return f"{self.table_bytes:,} bytes page-locked"
        return (
            f"{self.pinned_bytes:,} of {self.table_bytes:,} bytes page-locked, the rest is pageable and copied in "
            "steps: the system refused more (ulimit -l, or pinned_bytes in the profile)"
        )


def pin_in_pieces(table: torch.Tensor, *, register: Register | None = None, piece: int = PIN_PIECE_BYTES) -> Pinned:
    """Page-lock a table piece by piece, from its beginning, until the system refuses; what is locked stays so.

    register   how; None: the CUDA runtime
    """
    register = register or _cuda_register
    begin, size = table.data_ptr(), table.numel() * table.element_size()
    done = 0
    while done < size and register(begin + done, min(piece, size - done)):
        done += min(piece, size - done)
    return Pinned(size, done)


def _cuda_register(address: int, size: int) -> bool:
    return int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) == 0
