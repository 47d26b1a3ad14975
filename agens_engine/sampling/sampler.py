"""One request's way from logits to a distribution: the rules in order, with this request's settings and history.

    logits -> unused-token mask -> penalties -> logit bias -> row rules     = scores (log-probabilities, greedy choice)
           -> temperature -> top-k -> top-p -> min-p -> softmax             = probs (what a token is drawn from)

Order: spec serving.md section 6. Row j of a verify step is processed as if the drafts before it had been emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agens_engine.core import ReasoningReport, SamplingParams
from agens_engine.sampling.history import TokenHistory
from agens_engine.sampling.rules.logit_bias import apply_logit_bias, check_logit_bias
from agens_engine.sampling.rules.min_p import apply_min_p
from agens_engine.sampling.rules.penalties import apply_penalties
from agens_engine.sampling.rules.reasoning import ReasoningRule
from agens_engine.sampling.rules.row_rules import RowEffect, RowRule, apply_effect
from agens_engine.sampling.rules.temperature import apply_temperature
from agens_engine.sampling.rules.top_k import apply_top_k
from agens_engine.sampling.rules.top_p import FIRST_CANDIDATES, apply_top_p
from agens_engine.sampling.rules.unused_tokens import UnusedTokens
from agens_engine.sampling.seeds import RequestStream


@dataclass(frozen=True)
class ProcessedRows:
    """The rows of one sequence in one step.

    scores  [R, V] float32 (float64 when the logits are), -inf where a token is ruled out, before temperature
    probs   [R, V] of the same type, each row sums to 1; None for a greedy request
    """

    scores: torch.Tensor
    probs: torch.Tensor | None


class SequenceSampler:
    """Sampling state of one request: settings, token history, random stream.

    params       the request's settings
    prompt_ids   counted by the repetition penalty
    unused       the model's unused tokens; also fixes the vocabulary size
    row_rules    reasoning budget, grammar: rules that follow the text
    raises       RequestError for a logit bias outside the vocabulary
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        unused: UnusedTokens,
        row_rules: Sequence[RowRule] = (),
    ) -> None:
        check_logit_bias(params.logit_bias, unused.vocab_size)
        self.params = params
        self.stream = RequestStream(params.seed)
        self.num_output_tokens = 0
        self._unused = unused
        self._row_rules = tuple(row_rules)
        self._asked: tuple[tuple[int, ...], Sequence[Sequence[RowEffect | None]]] | None = None
        repeats = params.repetition_penalty != 1.0
        self._penalised = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._history = TokenHistory(prompt_ids if repeats else ()) if self._penalised else None
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias_values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    def scores_are_logits(self, drafts: tuple[int, ...] = ()) -> bool:
        """True when no rule but the unused-token mask changes the rows of these drafts: arg max needs no copy."""
        if self._penalised or self.params.logit_bias:
            return False
        return all(effect is None for effects in self._effects(drafts) for effect in effects)

    @property
    def reasoning(self) -> ReasoningReport | None:
        """How the thought of the answer went so far; None when nobody asked (Request.reasoning)."""
        return next((rule.report for rule in self._row_rules if isinstance(rule, ReasoningRule)), None)

    def process_rows(self, logits: torch.Tensor, drafts: tuple[int, ...] = ()) -> ProcessedRows:
        """Apply the rules to the rows of one sequence; the logits and the state of the rules stay as they are.

        logits   [R, V], R = len(drafts) + 1, any float type; row j was computed with drafts[:j] in the context
        drafts   the drafted tokens, in slot order
        """
        assert logits.shape == (len(drafts) + 1, self._unused.vocab_size), (logits.shape, drafts)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        scores = self._unused.apply(logits.to(dtype, copy=True))
        self._apply_history_rules(scores, drafts)
        return ProcessedRows(scores, None if self.params.greedy else self._distribution(scores))

    def commit(self, token_ids: Sequence[int]) -> None:
        """These tokens were appended to the answer, in order."""
        self.num_output_tokens += len(token_ids)
        self._asked = None
        if self._history is not None:
            self._history.append(token_ids)
        for rule in self._row_rules:
            rule.commit(token_ids)

    def _apply_history_rules(self, scores: torch.Tensor, drafts: tuple[int, ...]) -> None:
        device = scores.device
        if self._history is not None:
            ids, seen, counts = self._history.rows(drafts)
            apply_penalties(
                scores,
                ids.to(device),
                seen.to(device),
                counts.to(device),
                repetition=self.params.repetition_penalty,
                presence=self.params.presence_penalty,
                frequency=self.params.frequency_penalty,
            )
        if self.params.logit_bias:
            apply_logit_bias(scores, self._bias_ids.to(device), self._bias_values.to(device))
        for effects in self._effects(drafts):
            for row, effect in zip(scores, effects, strict=True):
                if effect is not None:
                    apply_effect(row, effect)

    def _effects(self, drafts: tuple[int, ...]) -> Sequence[Sequence[RowEffect | None]]:
        """What every row rule asks of every row; asked for twice in a step, so the answer is kept until commit."""
        if self._asked is None or self._asked[0] != drafts:
            self._asked = (drafts, [rule.effects(drafts) for rule in self._row_rules])
        return self._asked[1]

    def _distribution(self, scores: torch.Tensor) -> torch.Tensor:
        top_k = self.params.top_k
        if 0 < top_k < scores.shape[-1]:
            values, ids = scores.topk(top_k + 1, dim=-1, sorted=True)
            if bool((values[:, top_k] < values[:, top_k - 1]).all()):
                # No tie at the cut, the usual case: the k survivors, in id order, are all the later rules need to see
                ids = ids[:, :top_k].sort(dim=-1).values
                return torch.zeros_like(scores).scatter_(1, ids, self._truncated(scores.gather(1, ids)))
        return self._truncated(scores.clone())

    def _truncated(self, rows: torch.Tensor) -> torch.Tensor:
        """Temperature and the three cuts on rows [R, n] of this method's own, then softmax."""
        params = self.params
        apply_temperature(rows, params.temperature)
        apply_top_k(rows, params.top_k)
        apply_top_p(rows, params.top_p, params.top_k or FIRST_CANDIDATES)
        apply_min_p(rows, params.min_p)
        return torch.softmax(rows, dim=-1)
