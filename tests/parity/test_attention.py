"""Window and far attention against a loop over the definition, in every tiling and both ways to read far blocks."""

from __future__ import annotations

import pytest
import torch

from agens_kernels.ref import attention as ref

WINDOW, COMPRESS, TOPK = 8, 2, 3


def case(length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen)

    return {
        "q": normal(1, length, 4, 6),
        "k": normal(1, length, 2, 6),
        "v": normal(1, length, 2, 6),
        "iq": normal(1, length, 5),
        "ik": normal(1, length, 5),
    }


def by_definition(c: dict[str, torch.Tensor]) -> torch.Tensor:
    """Spec volundr-model.md 7.3, one query and head at a time, in float64."""
    q, k, v, iq, ik = (c[name][0].double() for name in ("q", "k", "v", "iq", "ik"))
    out = torch.zeros_like(q)
    for t in range(q.shape[0]):
        local = [p for p in range(t + 1) if p > t - WINDOW]
        blocks = [n for n in range(t) if (n + 1) * COMPRESS - 1 <= t - WINDOW]
        scores = {n: float(iq[t] @ ik[n * COMPRESS : (n + 1) * COMPRESS].mean(0)) for n in blocks}
        chosen = sorted(sorted(blocks, key=lambda n: (-scores[n], n))[:TOPK])
        for h in range(q.shape[1]):
            kv = h // 2
            keys = [k[p, kv] for p in local]
            keys += [k[n * COMPRESS : (n + 1) * COMPRESS, kv].mean(0) for n in chosen]
            values = [v[p, kv] for p in local]
            values += [v[n * COMPRESS : (n + 1) * COMPRESS, kv].mean(0) for n in chosen]
            weights = (torch.stack(keys) @ q[t, h] * q.shape[-1] ** -0.5).softmax(0)
            out[t, h] = weights @ torch.stack(values)
    return out


def run(c: dict[str, torch.Tensor], first: int = 0, poison: bool = True) -> torch.Tensor:
    length = c["q"].shape[1]
    blocks = ref.visible_far_blocks(length - 1, WINDOW, COMPRESS)

    def pooled(x: torch.Tensor) -> torch.Tensor:
        mean = x[:, : blocks * COMPRESS].unflatten(1, (blocks, COMPRESS)).mean(2)
        # what no query may see is filled with huge values
        return torch.cat((mean, torch.full_like(mean[:, :1], 1e30)), 1) if poison else mean

    start = max(0, first - WINDOW + 1)
    return ref.window_far_attention(
        c["q"][:, first:],
        c["k"][:, start:],
        c["v"][:, start:],
        first=first,
        key_start=start,
        far=ref.TensorFar(pooled(c["k"]), pooled(c["v"]), pooled(c["ik"])),
        index_query=c["iq"][:, first:],
        window=WINDOW,
        compress=COMPRESS,
        topk=TOPK,
    )


@pytest.mark.parametrize("length", [1, 8, 9, 10, 11, 31, 90])
@pytest.mark.parametrize("tile", [1, 5000, 1 << 24])
@pytest.mark.parametrize("gather", [0, 4, 1000])
def test_equals_the_definition(length: int, tile: int, gather: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ref, "TILE_ELEMENTS", tile)
    monkeypatch.setattr(ref, "GATHER_FACTOR", gather)
    c = case(length)
    assert torch.allclose(run(c)[0].double(), by_definition(c), atol=1e-5)


def test_a_later_segment_sees_the_same() -> None:
    c = case(60)
    expected = by_definition(c)
    for first in (7, 8, 23, 59):
        assert torch.allclose(run(c, first)[0].double(), expected[first:], atol=1e-5), first


def test_causal_attention_tiles() -> None:
    c = case(50)
    whole = ref.causal_attention(c["q"], c["k"], c["v"], first=0)
    tail = ref.causal_attention(c["q"][:, 43:], c["k"], c["v"], first=43)
    assert torch.allclose(tail, whole[:, 43:], atol=1e-6)
    reference = torch.nn.functional.scaled_dot_product_attention(
        c["q"].transpose(1, 2), c["k"].transpose(1, 2), c["v"].transpose(1, 2), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(whole, reference, atol=1e-5)


def test_causal_attention_reads_keys_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(50)
    whole = ref.causal_attention(c["q"], c["k"], c["v"], first=0)
    asked: list[int] = []

    def read(a: int, z: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(z - a)
        return c["k"][:, a:z], c["v"][:, a:z]

    monkeypatch.setattr(ref, "KEY_TILE_ROWS", 7)
    assert torch.allclose(ref.causal_attention_over(c["q"], read, first=0), whole, atol=1e-6)
    assert max(asked) == 7


def test_rope_frequencies_of_the_specification() -> None:
    cos, sin = ref.rope_tables(torch.tensor([1, 262143]), 64, 1e7)
    angle = torch.atan2(sin[0], cos[0])
    assert torch.allclose(angle[[0, 1, 31]], torch.tensor([1.0, 0.60429639, 1.6548170999e-07]), rtol=1e-6)
    exact = torch.tensor(262143 * 0.60429639023813, dtype=torch.float64)
    assert abs(float(cos[1, 1]) - float(exact.cos())) < 1e-4
