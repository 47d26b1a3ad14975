"""Kimi delta attention: gated delta rule with one decay per key channel, as a recurrence and in chunks.

Math    S <- diag(exp(g)) S;  r = v - S^T k;  S <- S + k (beta r)^T;  o = S^T q        (spec volundr-model.md section 6)
Layout  q, k, g [B, T, Hv, Dk]; v [B, T, Hv, Dv]; beta [B, T, Hv]; state [B, Hv, Dk, Dv]; float32 throughout
        q and k are already normalised, scaled and repeated to the value heads
Test    tests/parity/test_kda.py

The chunked form rewrites 16 steps as matrix products. Within a chunk the products need exp(G_i - G_j) per channel, with
G the running sum of g. When no channel decays by more than e^-FACTOR_LIMIT on either side of the chunk's middle, the
factor splits into exp(G_i - mid) * exp(mid - G_j), both finite; else the differences are exponentiated pair by pair.
The running sum is kept in float64: its rounding would otherwise be a relative error of the result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 16
FACTOR_LIMIT = 40.0


def causal_conv(u: torch.Tensor, tail: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Depthwise causal convolution and SiLU (spec section 6, step 2).

    u [B, T, ch] current inputs; tail [B, K-1, ch] the inputs before them (zeros at the start); weight [ch, K], the last
    tap multiplies the current token. Returns [B, T, ch].
    """
    taps, length = weight.shape[1], u.shape[1]
    padded = torch.cat((tail, u), 1)
    out = padded[:, :length] * weight[:, 0]
    for j in range(1, taps):
        out = torch.addcmul(out, padded[:, j : j + length], weight[:, j])
    return F.silu(out)


def log_decay(raw: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """g = -exp(A_log) * softplus(raw + dt_bias). raw [..., Hv, Dk], a_log [Hv], dt_bias [Hv * Dk]; returns like raw."""
    bias = dt_bias.view(raw.shape[-2:])
    return -a_log.exp().unsqueeze(-1) * F.softplus(raw + bias, threshold=20.0)


def recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step by step, for the few rows of a decode or verify step. Returns (o [B, T, Hv, Dv], final state)."""
    decay = g.exp()
    outputs = []
    for t in range(q.shape[1]):
        state, out = _step(q[:, t], k[:, t], v[:, t], decay[:, t], beta[:, t], state)
        outputs.append(out)
    return torch.stack(outputs, 1), state


def replay(k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The state after these rows, by the same arithmetic as `recurrent` (bit for bit)."""
    decay = g.exp()
    for t in range(k.shape[1]):
        state, _ = _step(None, k[:, t], v[:, t], decay[:, t], beta[:, t], state)
    return state


def _step(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    state = state * decay.unsqueeze(-1)
    residual = v - torch.matmul(k.unsqueeze(-2), state).squeeze(-2)
    state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * residual).unsqueeze(-2)
    out = residual if q is None else torch.matmul(q.unsqueeze(-2), state).squeeze(-2)
    return state, out


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same result in chunks, for prefill; differentiable. Returns (o [B, T, Hv, Dv], final state)."""
    batch, length, heads, _ = q.shape
    pad = -length % chunk
    # [B, Hv, N, chunk, D]: zero keys, zero beta and zero decay leave the state as it is
    q, k, v, g = (_to_chunks(x, pad, chunk) for x in (q, k, v, g))
    beta = F.pad(beta, (0, 0, 0, pad)).unflatten(1, (-1, chunk)).permute(0, 3, 1, 2)

    running = g.double().cumsum(3)  # G, inclusive
    decayed_k = k * running.exp().to(k.dtype)  # k_i e^{G_i}, <= 1 in every factor
    decayed_q = q * running.exp().to(q.dtype)
    to_end = (running[..., -1:, :] - running).exp().to(k.dtype)  # e^{G_end - G_j}
    total = running[..., -1, :].exp().to(k.dtype).unsqueeze(-1)  # [B, H, N, Dk, 1]
    key_key, query_key = _within_chunk(q, k, running)

    eye = torch.eye(chunk, dtype=k.dtype, device=k.device)
    system = eye + beta.unsqueeze(-1) * key_key.tril(-1)
    rhs = beta.unsqueeze(-1) * torch.cat((v, decayed_k), -1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    u0, w = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    query_key = query_key.tril()
    end_k = (k * to_end).transpose(-1, -2)

    states, updates = [], []
    for n in range(q.shape[2]):
        states.append(state)
        update = u0[:, :, n] - w[:, :, n] @ state
        updates.append(update)
        state = total[:, :, n] * state + end_k[:, :, n] @ update
    out = decayed_q @ torch.stack(states, 2) + query_key @ torch.stack(updates, 2)
    return out.permute(0, 2, 3, 1, 4).reshape(batch, length + pad, heads, -1)[:, :length], state


def _to_chunks(x: torch.Tensor, pad: int, chunk: int) -> torch.Tensor:
    """[B, T, H, D] -> [B, H, N, chunk, D], zero padded."""
    return F.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4)


def _within_chunk(q: torch.Tensor, k: torch.Tensor, running: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_c x_i[c] k_j[c] exp(G_i[c] - G_j[c]) for x = k and x = q; entries above the diagonal are meaningless."""
    middle = running[..., running.shape[3] // 2 - 1 : running.shape[3] // 2, :]
    offset = (running - middle).to(k.dtype)
    if offset.detach().abs().max() <= FACTOR_LIMIT:
        grow, shrink = offset.exp(), (-offset).exp()
        right = (k * shrink).transpose(-1, -2)
        return (k * grow) @ right, (q * grow) @ right
    rows = []
    for i in range(k.shape[3]):  # one row of the chunk at a time: [.., j, Dk]
        difference = (running[..., i : i + 1, :] - running).clamp_max(0.0).exp().to(k.dtype)
        weighted = (k * difference).transpose(-1, -2)
        rows.append((k[..., i : i + 1, :] @ weighted, q[..., i : i + 1, :] @ weighted))
    return torch.cat([r[0] for r in rows], -2), torch.cat([r[1] for r in rows], -2)
