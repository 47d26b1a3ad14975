"""Manifold hyper-connections: mix the residual streams into a layer's input and its output back into them.

Source: spec volundr-model.md section 5. S streams (4), T tokens, C channels.
"""

from __future__ import annotations

import torch

CLAMP = 1e-9


def sinkhorn(logits: torch.Tensor, iters: int) -> torch.Tensor:
    """Doubly normalise exp(logits): rows first, columns second, `iters` full rounds.

    logits [..., S, S] float32, entry [a][b] from input stream b to output stream a; returns the same shape, columns sum
    to 1 exactly. The sums run over leading axes internally, so that the work is vectorised over tokens.
    """
    streams = logits.shape[-1]
    m = logits.reshape(-1, streams, streams).permute(1, 2, 0).contiguous()  # [a, b, T]
    m = torch.exp(m - m.amax((0, 1), keepdim=True))
    for _ in range(iters):
        m = m / m.sum(1, keepdim=True).clamp_min(CLAMP)
        m = m / m.sum(0, keepdim=True).clamp_min(CLAMP)
    # contiguous, or the batched products that follow run one token at a time
    return m.permute(2, 0, 1).contiguous().view(logits.shape)


def mix(
    streams: torch.Tensor,
    dyn_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    statics: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    iters: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """streams [T, S, C] -> layer input x [T, C], post [T, S], R [T, S, S]."""
    num = streams.shape[1]
    pre_static, post_static, res_static = statics
    mean = streams.mean(1)
    normed = torch.nn.functional.rms_norm(mean, norm_weight.shape, norm_weight, eps)
    dyn = normed @ dyn_weight.T  # [T, 2S + S*S]
    pre = pre_static + dyn[:, :num]
    post = post_static + dyn[:, num : 2 * num]
    res = sinkhorn(res_static + dyn[:, 2 * num :].unflatten(-1, (num, num)), iters)
    x = torch.bmm(pre.unsqueeze(1), streams).squeeze(1)
    return x, post, res


def combine(streams: torch.Tensor, res: torch.Tensor, post: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """H'[a] = sum_b R[a][b] H[b] + post[a] * delta. streams [T, S, C], res [T, S, S], post [T, S], delta [T, C]."""
    return torch.baddbmm(torch.bmm(res, streams), post.unsqueeze(2), delta.unsqueeze(1))
