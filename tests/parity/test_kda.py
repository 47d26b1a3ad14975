"""KDA: the chunked form against the recurrence, the recurrence against numbers computed by hand."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agens_kernels.ref import kda

TOLERANCE = 1e-5  # relative to the largest output of the case


def random_case(seed: int, length: int, decay: float, spread: float, beta_high: float) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta, state with log decays up to about decay * e^spread in size; keys may repeat."""
    gen = torch.Generator().manual_seed(seed)
    batch, heads, dk, dv = 2, 2, 8, 8

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen)

    q = torch.nn.functional.normalize(normal(batch, length, heads, dk), dim=-1) * dk**-0.5
    k = torch.nn.functional.normalize(normal(batch, length, heads, dk), dim=-1)
    if seed % 3 == 0:
        k[:, length // 2 :] = k[:, :1]  # the hardest keys for the triangular solve: all equal
    v = normal(batch, length, heads, dv)
    g = -decay * torch.exp(spread * normal(batch, length, heads, dk))
    beta = beta_high * torch.rand(batch, length, heads, generator=gen)
    return q, k, v, g, beta, normal(batch, heads, dk, dv)


@settings(max_examples=1000, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(1, 70),
    decay=st.sampled_from([0.0, 0.01, 0.3, 3.0, 30.0, 300.0]),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
    beta_high=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_chunked_equals_recurrent(seed: int, length: int, decay: float, spread: float, beta_high: float) -> None:
    case = random_case(seed, length, decay, spread, beta_high)
    expected, expected_state = kda.recurrent(*(x.double() for x in case))
    out, state = kda.chunked(*case)
    assert torch.isfinite(out).all() and torch.isfinite(state).all()
    scale = max(1.0, float(expected.abs().max()))
    assert float((out - expected).abs().max()) <= TOLERANCE * scale
    state_scale = max(1.0, float(expected_state.abs().max()))
    assert float((state - expected_state).abs().max()) <= TOLERANCE * state_scale


def test_both_branches_of_the_decay_factor_agree() -> None:
    """The split factor and the pairwise differences are two ways to one number, on either side of the limit."""
    case = random_case(1, 48, 0.5, 1.0, 1.0)
    split, _ = kda.chunked(*case)
    limit = kda.FACTOR_LIMIT
    try:
        kda.FACTOR_LIMIT = 0.0
        pairwise, _ = kda.chunked(*case)
    finally:
        kda.FACTOR_LIMIT = limit
    assert float((split - pairwise).abs().max()) <= TOLERANCE
    assert not torch.equal(split, pairwise), "both runs took the same branch"


def test_numbers_of_the_specification() -> None:
    """Spec volundr-model.md section 12: one head, 2 x 2 channels, 3 tokens."""

    def rows(*values: tuple[float, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)[None, :, None]

    q, k = rows((0.6, 0.8), (1, 0), (0, 1)), rows((0.8, 0.6), (0.6, -0.8), (1, 0))
    v, g = rows((1, 2), (-1, 0.5), (0.25, -2)), rows((-0.1, -0.2), (-0.3, -0.05), (-0.7, -1.0))
    beta = torch.tensor([0.5, 0.9, 0.25], dtype=torch.float64)[None, :, None]
    out, state = kda.recurrent(q, k, v, g, beta, torch.zeros(1, 1, 2, 2, dtype=torch.float64))
    expected = rows((0.48, 0.96), (-0.21640342, 0.91719316), (0.35647877, 0.05077455))
    assert torch.allclose(out, expected, atol=1e-8)
    final = torch.tensor([[-0.01809707, -0.15840152], [0.35647877, 0.05077455]], dtype=torch.float64)
    assert torch.allclose(state[0, 0], final, atol=1e-8)


def test_replay_is_the_recurrence_bit_for_bit() -> None:
    q, k, v, g, beta, state = random_case(3, 8, 0.3, 1.0, 1.0)
    for kept in range(9):
        a, b, c, d, e = (x[:, :kept] for x in (q, k, v, g, beta))
        expected = kda.recurrent(a, b, c, d, e, state)[1] if kept else state
        replayed = kda.replay(k[:, :kept], v[:, :kept], g[:, :kept], beta[:, :kept], state)
        assert torch.equal(replayed, expected), kept


def test_convolution_carries_its_tail() -> None:
    gen = torch.Generator().manual_seed(0)
    u, weight = torch.randn(1, 9, 5, generator=gen), torch.randn(5, 4, generator=gen)
    zero = torch.zeros(1, 3, 5)
    whole = kda.causal_conv(u, zero, weight)
    parts = [kda.causal_conv(u[:, :2], zero, weight)]
    tail = torch.cat((zero, u[:, :2]), 1)[:, -3:]
    parts.append(kda.causal_conv(u[:, 2:], tail, weight))
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-6)
    first = torch.nn.functional.silu(u[0, 0] * weight[:, 3])
    assert torch.allclose(whole[0, 0], first, atol=1e-6)
