"""Far-block selection in tiles against the whole matrix of scores, sorted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agens_kernels.ref import block_select as ref


def untiled(scores: torch.Tensor, positions: torch.Tensor, *, window: int, compress: int, topk: int) -> list[list[int]]:
    """Straight from the definition; scores [T, N]."""
    found = []
    for row, position in zip(scores.tolist(), positions.tolist(), strict=True):
        visible = [n for n in range(len(row)) if (n + 1) * compress - 1 <= position - window]
        found.append(sorted(sorted(visible, key=lambda n: (-row[n], n))[:topk]))
    return found


def chosen_blocks(selected: torch.Tensor) -> list[list[int]]:
    """[1, T, K] -> block numbers; -1 may only stand behind the last one."""
    rows = selected[0].tolist()
    blocks = [[n for n in row if n >= 0] for row in rows]
    assert all(row[: len(kept)] == kept == sorted(set(kept)) for row, kept in zip(rows, blocks, strict=True))
    return blocks


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(1, 20),
    first=st.integers(0, 300),
    window=st.integers(1, 30),
    compress=st.integers(1, 5),
    topk=st.integers(1, 12),
    tile=st.sampled_from([(1, 1), (3, 2), (64, 7), (5, 16), (64, 4096)]),
    levels=st.sampled_from([1, 2, 5, 10**6]),
    seed=st.integers(0, 10**6),
)
def test_tiles_choose_what_the_whole_matrix_says(
    length: int, first: int, window: int, compress: int, topk: int, tile: tuple[int, int], levels: int, seed: int
) -> None:
    """Few levels make many equal scores: then the lowest block wins, across tiles too."""
    gen = torch.Generator().manual_seed(seed)
    positions = torch.arange(first, first + length)
    num = ref.visible_far_blocks(int(positions[-1]), window, compress)
    keys = torch.randint(0, levels, (1, num, 1), generator=gen).float()
    query = torch.randint(1, 3, (1, length, 1), generator=gen).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ref, "SELECT_TILE_QUERIES", tile[0])
        patch.setattr(ref, "SELECT_TILE_BLOCKS", tile[1])
        selected = ref.select_blocks(
            query, lambda a, z: keys[:, a:z], positions, window=window, compress=compress, topk=topk
        )
    scores = (query @ keys.transpose(1, 2))[0]
    expected = untiled(scores, positions, window=window, compress=compress, topk=topk)
    assert chosen_blocks(selected) == expected
    assert selected.shape == (1, length, min(topk, num))


def test_real_scores_in_the_real_tiles() -> None:
    gen = torch.Generator().manual_seed(1)
    keys, query = torch.randn((1, 20_000, 16), generator=gen), torch.randn((1, 70, 16), generator=gen)
    positions = torch.arange(80_200, 80_270)
    selected = ref.select_blocks(query, lambda a, z: keys[:, a:z], positions, window=128, compress=4, topk=64)
    scores = (query @ keys.transpose(1, 2))[0]
    hidden = torch.arange(20_000) > ((positions - 128 - 3) // 4)[:, None]
    expected = scores.masked_fill(hidden, float("-inf")).topk(64).indices.sort().values
    assert torch.equal(selected[0], expected)


@pytest.mark.parametrize("length", [1, 8, 200])
def test_no_read_and_no_score_matrix_is_larger_than_a_tile(length: int) -> None:
    asked: list[int] = []
    keys = torch.randn((1, 101_000, 4), generator=torch.Generator().manual_seed(2))

    def read(a: int, z: int) -> torch.Tensor:
        asked.append(z - a)
        return keys[:, a:z]

    positions = torch.arange(400_200, 400_200 + length)
    query = torch.randn((1, length, 4), generator=torch.Generator().manual_seed(3))
    ref.select_blocks(query, read, positions, window=128, compress=4, topk=16)
    rows = min(length, ref.SELECT_TILE_QUERIES)
    assert max(asked) * rows <= ref.SELECT_TILE_QUERIES * ref.SELECT_TILE_BLOCKS
    assert sum(asked) == ref.visible_far_blocks(int(positions[-1]), 128, 4)


@pytest.mark.parametrize(
    ("position", "blocks"),
    [(0, 0), (4095, 0), (4096, 0), (4098, 0), (4099, 1), (4102, 1), (4103, 2), (8191, 1024), (100000, 23976)],
)
def test_visible_far_blocks_of_the_specification(position: int, blocks: int) -> None:
    assert ref.visible_far_blocks(position, 4096, 4) == blocks
