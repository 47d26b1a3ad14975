"""Any cut of a text into segments, alone or beside other sequences, gives the hidden states of one pass over it.

In float64: these random nets amplify float32 rounding, which would hide a small mistake or look like one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agens_engine.model.batch import StepBatch
from agens_engine.model.volundr import Volundr
from tests.modelkit import CPU, new_pool, random_model

# (mixers, head counts, window, compress, topk, streams): every block kind in small and odd sizes
SHAPES: list[dict[str, Any]] = [
    {},
    {"mhc_streams": 0, "engram_layers": []},
    {"bcsa_window": 8, "bcsa_compress": 8, "bcsa_topk": 1, "mhc_streams": 2},
    {"mixer_types": ["bcsa", "attn", "bcsa", "kda"], "bcsa_window": 9, "bcsa_compress": 3, "bcsa_topk": 2},
    {"mixer_types": ["kda"] * 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "engram_orders": [3, 5]},
    {"num_attention_heads": 3, "num_key_value_heads": 1, "linear_conv_kernel_dim": 2, "head_dim": 8},
]


TOLERANCE = 1e-8


@cache
def model(index: int) -> Volundr:
    return random_model(index, **SHAPES[index]).double()


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """State and activations follow the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.integers(0, len(SHAPES) - 1),
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_segments_of_several_sequences(shape: int, seed: int, cuts: list[list[int]]) -> None:
    net, gen = model(shape), torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, 96, (sum(sizes),), generator=gen).tolist() for sizes in cuts]
    pool = new_pool(net, slots=len(cuts), context=200, chunk=32)
    states = [pool.create() for _ in cuts]
    got: list[list[torch.Tensor]] = [[] for _ in cuts]
    with torch.inference_mode():
        for turn in range(max(map(len, cuts))):
            live = [i for i, sizes in enumerate(cuts) if turn < len(sizes)]
            segments = []
            for i in live:
                first = states[i].num_tokens
                segments.append((states[i], texts[i][first : first + cuts[i][turn]]))
            hidden, _ = net(StepBatch(segments, CPU))
            for i, part in zip(live, hidden.split([len(ids) for _, ids in segments]), strict=True):
                got[i].append(part)
                states[i].commit(part.shape[0])
    for text, parts in zip(texts, got, strict=True):
        with torch.inference_mode():
            expected, _ = net(net.fresh_batch(torch.tensor([text])))
        assert expected.dtype == torch.float64
        assert float((torch.cat(parts) - expected).abs().max()) < TOLERANCE
