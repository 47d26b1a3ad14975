"""A linear that keeps its weights in the low-bit device layout and multiplies from the packed words, piece by piece.

    x [T, K] ──► for each piece of tiles: decode to float32, y[:, rows] += x[:, columns] W.T, forget the piece

This is the execution for a CPU whose memory does not hold the float32 weights; where it does, the loader decodes them
once and a plain nn.Linear remains. The plan decides (planning.plan_run). Scratch: the plan's line runtime.unpack.
Layout: agens_quant/format.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from agens_kernels.ref.lowbit_matmul import decode
from agens_planner.constants import REFERENCE_UNPACK_VALUES
from agens_quant.format import TILE_COLUMNS, TILE_ROWS, PackedTensor

_PIECE_TILES = REFERENCE_UNPACK_VALUES // (TILE_ROWS * TILE_COLUMNS)


class LowbitLinear(nn.Module):
    """y = x W.T without bias; the buffers are views of one packed blob, which must outlive them unchanged."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    table: torch.Tensor | None
    group_tables: torch.Tensor | None
    columns: torch.Tensor | None

    def __init__(self, packed: PackedTensor) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.format, self.exponent, self.nbytes = packed.format, packed.exponent, packed.nbytes
        present = packed.format.sections(packed.shape[0], packed.padded_columns)
        for name in ("codes", "scales", "zeros", "table", "group_tables", "columns"):
            view = torch.from_numpy(packed.section(name)) if name in present else None
            self.register_buffer(name, view, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N] float32; the sum over K is split at the pieces' borders."""
        rows = x.reshape(-1, self.in_features).float()
        out = rows.new_zeros(rows.shape[0], self.out_features)
        row_tiles, column_tiles = self.codes.shape[:2]
        step = max(1, _PIECE_TILES // column_tiles)
        for first in range(0, row_tiles, step):
            tiles = slice(first, min(first + step, row_tiles))
            place = slice(first * TILE_ROWS, min(tiles.stop * TILE_ROWS, self.out_features))
            for across in self._column_pieces():
                taken = self._columns_of(rows, across)
                weights = self._decode(tiles, across, (place.stop - place.start, taken.shape[1]))
                out[:, place].addmm_(taken, weights.T)
        return out.view(*x.shape[:-1], self.out_features)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix: ids [M] int64 -> [M, K] float32. Decodes the row tiles that hold them, one by one."""
        out = torch.empty(ids.shape[0], self.in_features, device=self.codes.device)
        tile_of = ids // TILE_ROWS
        for tile in torch.unique(tile_of).tolist():
            here = tile_of == tile
            out[here] = self._tile_rows(tile)[ids[here] % TILE_ROWS]
        return out

    def _tile_rows(self, tile: int) -> torch.Tensor:
        """[128, K] float32, in the order of the source's columns."""
        whole = torch.zeros(TILE_ROWS, self.in_features, device=self.codes.device)
        for across in self._column_pieces():
            sources = self._sources(across)
            real = sources >= 0
            width = int(real.sum()) if self.columns is None else sources.shape[0]
            piece = self._decode(slice(tile, tile + 1), across, (TILE_ROWS, width))
            whole[:, sources[real]] = piece if self.columns is None else piece[:, real]
        return whole

    def _column_pieces(self) -> Iterator[slice]:
        column_tiles = self.codes.shape[1]
        for left in range(0, column_tiles, _PIECE_TILES):
            yield slice(left, min(left + _PIECE_TILES, column_tiles))

    def _sources(self, across: slice) -> torch.Tensor:
        """[columns of the tiles] source column of each, -1 for padding."""
        span = slice(across.start * TILE_COLUMNS, across.stop * TILE_COLUMNS)
        if self.columns is not None:
            return self.columns[span].long()
        columns = torch.arange(span.start, span.stop, device=self.codes.device)
        return torch.where(columns < self.in_features, columns, -1)

    def _columns_of(self, rows: torch.Tensor, across: slice) -> torch.Tensor:
        """[T, columns of the tiles] in the order of the layout: a view, or with a column map a gathered copy."""
        if self.columns is None:
            return rows[:, across.start * TILE_COLUMNS : across.stop * TILE_COLUMNS]
        sources = self._sources(across)
        taken = rows.index_select(1, sources.clamp(min=0))
        taken[:, sources < 0] = 0.0  # padding inside a group decodes to something
        return taken

    def _decode(self, tiles: slice, across: slice, shape: tuple[int, int]) -> torch.Tensor:
        def cut(section: torch.Tensor | None) -> torch.Tensor | None:
            return None if section is None else section[tiles, across]

        return decode(
            self.codes[tiles, across].contiguous(),
            self.scales[tiles, across],
            shape=shape,
            bits=self.format.bits,
            exponent=self.exponent,
            zeros=cut(self.zeros),
            table=self.table,
            group_tables=cut(self.group_tables),
        )

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.format}"
