"""Accept or replace drafts so that the output is distributed exactly as without them (spec drafters.md section D).

Row j of a verify step holds the target's view of the token at slot j + 1. Every row chooses a token; drafts are
accepted as long as they equal the row's choice; the first row that differs supplies its own token, and a fully accepted
chain gets one more from its last row.

Greedy       the choice is arg max, ties to the lowest id
Point mass   the choice is drawn from p with the position's DRAW number. It equals the draft with probability p(draft),
             and given that it does not, it is distributed as p without the draft, renormalised: the rejection rule of
             D.3. The number belongs to the position, so a seeded request gets the same text with and without drafts.
General q    (Leviathan et al., arXiv:2211.17192) accept when u * q(d) < p(d); else draw from max(p - q, 0) normalised,
             or from p when that is all zero
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agens_engine.core import DraftChain, TokenLogprob
from agens_engine.errors import AgensError
from agens_engine.sampling.draw import draw_tokens
from agens_engine.sampling.logprobs import token_logprobs
from agens_engine.sampling.rules.unused_tokens import UnusedTokens
from agens_engine.sampling.sampler import SequenceSampler
from agens_engine.sampling.seeds import Lane


@dataclass(frozen=True)
class Verdict:
    """Outcome of one verify step for one sequence.

    committed     accepted drafts, then the bonus token: num_accepted + 1 tokens, before stop conditions
    logprobs      one entry per committed token when the request asked for them
    error         the rows were unusable (no token possible, NaN); nothing is committed and only this request fails
    """

    committed: tuple[int, ...] = ()
    num_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    error: AgensError | None = None


@dataclass(frozen=True)
class VerifyItem:
    """One sequence of a step: its rows are first_row .. first_row + len(chain) of the step's logits."""

    sampler: SequenceSampler
    chain: DraftChain
    first_row: int


def accept_prefix(drafts: Sequence[int], choices: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Accept drafts while they equal the row's own choice.

    drafts    n tokens
    choices   n + 1 tokens, choices[j] being what row j chose
    returns   (committed tokens, num_accepted)
    """
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == choices[num_accepted]:
        num_accepted += 1
    return (*drafts[:num_accepted], choices[num_accepted]), num_accepted


def choose_against_q(
    p: torch.Tensor, q: torch.Tensor, drafts: torch.Tensor, accept_u: torch.Tensor, draw_u: torch.Tensor
) -> torch.Tensor:
    """The rejection rule for drafts drawn from q, one independent row each.

    p, q              [N, V] target and proposal distributions
    drafts            [N] int64, drawn from q
    accept_u, draw_u  [N] float64 in [0, 1), independent of each other and of the drafts
    returns           [N] int64: the draft where it is accepted, else a token from the residual; distributed as p
    """
    p, q = p.double(), q.double()
    p_draft = p.gather(1, drafts[:, None])[:, 0]
    q_draft = q.gather(1, drafts[:, None])[:, 0]
    accepted = accept_u * q_draft < p_draft
    residual = (p - q).clamp_(min=0.0)
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0.0, residual, p)
    return torch.where(accepted, drafts, draw_tokens(residual, draw_u))


def choose_rows(p: torch.Tensor, chain: DraftChain, accept_u: np.ndarray, draw_u: np.ndarray) -> list[int]:
    """What each row of a sampled verify step chooses.

    p         [R, V], R = len(chain) + 1, row j processed with the drafts before it
    accept_u  [R] float64, used by rows whose draft came with a distribution
    draw_u    [R] float64
    returns   R tokens, for accept_prefix
    """
    device = p.device
    uniforms = torch.from_numpy(np.ascontiguousarray(draw_u)).to(device)
    choices: list[int] = draw_tokens(p, uniforms).tolist()
    first = 0
    for run in chain.runs:
        last = first + len(run.token_ids)
        if run.q is not None:
            q = torch.from_numpy(run.q[:, : p.shape[1]]).to(device)
            if q.shape[1] < p.shape[1]:
                q = torch.nn.functional.pad(q, (0, p.shape[1] - q.shape[1]))
            choices[first:last] = choose_against_q(
                p[first:last],
                q,
                torch.tensor(run.token_ids, device=device),
                torch.from_numpy(np.ascontiguousarray(accept_u[first:last])).to(device),
                uniforms[first:last],
            ).tolist()
        first = last
    return choices


def verify_batch(logits: torch.Tensor, items: Sequence[VerifyItem], unused: UnusedTokens) -> list[Verdict]:
    """Verify every sequence of a step. Memory and samplers stay untouched: the caller commits what it keeps.

    logits   [R, V] of the step. They are the step's scratch: the unused-token mask is written into them.
    returns  one verdict per item, in order
    """
    unused.apply(logits)
    best, best_ids = logits.max(dim=-1)
    usable: list[bool] = best.isfinite().tolist()  # max is NaN when any entry is, -inf when no token is possible
    greedy_ids: list[int] = best_ids.tolist()
    return [_verify_one(logits, item, greedy_ids, usable) for item in items]


def _verify_one(logits: torch.Tensor, item: VerifyItem, greedy_ids: list[int], usable: list[bool]) -> Verdict:
    sampler, drafts = item.sampler, item.chain.token_ids
    first, last = item.first_row, item.first_row + len(drafts) + 1
    # A row past the first refused draft may be unusable without harm, so a fault is reported only where it decides
    rows_usable = usable[first:last]
    scores = logits[first:last]
    if sampler.params.greedy and sampler.scores_are_logits(drafts):
        choices = greedy_ids[first:last]
    else:
        rows = sampler.process_rows(scores, drafts)
        scores = rows.scores
        best, best_ids = scores.max(dim=-1)
        rows_usable = best.isfinite().tolist()
        if rows.probs is None:
            choices = best_ids.tolist()
        else:
            position, num = sampler.num_output_tokens, len(drafts) + 1
            accept_u = sampler.stream.uniforms(position, num, Lane.ACCEPT)
            draw_u = sampler.stream.uniforms(position, num, Lane.DRAW)
            choices = choose_rows(rows.probs, item.chain, accept_u, draw_u)
    committed, num_accepted = accept_prefix(drafts, choices)
    if not all(rows_usable[: num_accepted + 1]):
        return Verdict(error=_unusable(scores[rows_usable.index(False)], sampler, drafts))
    num_top = sampler.params.logprobs
    logprobs = () if num_top is None else tuple(token_logprobs(scores, committed, num_top))
    return Verdict(committed, num_accepted, logprobs)


def _unusable(row: torch.Tensor, sampler: SequenceSampler, drafts: tuple[int, ...]) -> AgensError:
    where = f"output token {sampler.num_output_tokens} ({len(drafts)} drafts)"
    if bool(row.isnan().any()):
        return AgensError(f"the model's logits at {where} contain NaN; the weights or the kernels are damaged")
    return AgensError(f"no token is possible at {where}: logit bias, budget and grammar rules exclude each other")
