"""How far a candidate's predictions are from the reference's, counted row by row so that no full logits are ever kept.

Per token: KL(reference || candidate) in natural log, whether both prefer the same token, and the negative
log-likelihood of the token that really follows under either.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Quality:
    """tokens counts compared positions; the perplexity ratio is candidate over reference on the positions that have a
    following token."""

    mean_kl: float
    p99_kl: float
    top1_agreement: float
    perplexity_ratio: float
    reference_perplexity: float
    tokens: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


class QualityMeter:
    """Takes rows of logits in any number of pieces."""

    def __init__(self) -> None:
        self._kl: list[np.ndarray] = []
        self._agreed = 0
        self._scored = 0
        self._reference_nll = 0.0
        self._candidate_nll = 0.0

    def add(self, reference: Tensor, candidate: Tensor, following: Tensor) -> None:
        """reference, candidate [R, V] logits; following [F] ids that come after the first F <= R rows.

        raises  ValueError where logits are not finite
        """
        p, q = (F.log_softmax(x.float(), -1) for x in (reference, candidate))
        kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
        if not bool(torch.isfinite(kl).all()):
            raise ValueError("logits are not finite")
        self._kl.append(kl.double().numpy())
        self._agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        rows = following.shape[0]
        self._scored += rows
        self._reference_nll -= float(p[:rows].gather(1, following[:, None]).double().sum())
        self._candidate_nll -= float(q[:rows].gather(1, following[:, None]).double().sum())

    def result(self) -> Quality:
        """raises ValueError when nothing was added."""
        if not self._kl:
            raise ValueError("no token was compared")
        kl = np.concatenate(self._kl)
        scored = max(1, self._scored)
        return Quality(
            mean_kl=float(kl.mean()),
            p99_kl=float(np.quantile(kl, 0.99)),
            top1_agreement=self._agreed / len(kl),
            perplexity_ratio=math.exp((self._candidate_nll - self._reference_nll) / scored),
            reference_perplexity=math.exp(self._reference_nll / scored),
            tokens=len(kl),
        )
