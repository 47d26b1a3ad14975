"""One step on the model: segments in, verdicts out, and the rows that draft sources may take in. Commits nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from agens_engine.core import DraftChain
from agens_engine.memory.arena import Arena
from agens_engine.memory.state import SequenceState
from agens_engine.model.batch import StepBatch
from agens_engine.model.volundr import Volundr
from agens_engine.sampling.rules.unused_tokens import UnusedTokens
from agens_engine.scheduler import Work
from agens_engine.sequence import LiveSequence
from agens_engine.speculate.drafting import Drafted
from agens_engine.speculate.source import CommittedRows, Reads
from agens_engine.speculate.verify import Verdict, VerifyItem, verify_batch


@dataclass(frozen=True)
class StepOutcome:
    """What one step gave.

    verdicts      one per segment; None for a prefill chunk that does not end its prompt
    sizes         rows of each segment
    hidden, taps  [T, C] and [T, n_taps * C] for the draft sources, or None when none reads them
    """

    verdicts: list[Verdict | None]
    sizes: list[int]
    hidden: torch.Tensor | None
    taps: torch.Tensor | None

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    @property
    def handed_over(self) -> bool:
        return self.hidden is not None or self.taps is not None

    def committed(self, segment: int, sequence: LiveSequence, first: int, num_rows: int) -> CommittedRows:
        """The first rows of a segment, final now, at positions first .. of its sequence."""
        begin = sum(self.sizes[:segment])
        hidden, taps = (None if x is None else x[begin : begin + num_rows] for x in (self.hidden, self.taps))
        device = next(x.device for x in (hidden, taps) if x is not None)
        next_ids = torch.tensor(sequence.token_ids[first + 1 : first + 1 + num_rows], device=device)
        return CommittedRows(sequence, first, hidden, taps, next_ids)


class StepRunner:
    """Runs steps on one model; the arena counts the logits of each."""

    def __init__(self, model: Volundr, unused: UnusedTokens, arena: Arena | None = None) -> None:
        self._model, self._unused, self._arena = model, unused, arena
        self._device = model.model.norm.weight.device

    def run(self, work: Sequence[Work], drafted: Sequence[Drafted], reads: Reads) -> StepOutcome:
        """One forward over all segments, logits where a token is chosen, and the choice.

        drafted   one per segment, empty for prefill chunks
        reads     what the draft sources want of the rows
        """
        segments: list[tuple[SequenceState, list[int]]] = []
        items: list[VerifyItem] = []
        rows: list[int] = []  # rows of the step whose logits are needed
        end = 0
        for item, draft in zip(work, drafted, strict=True):
            sequence = item.sequence
            assert sequence.state is not None
            if item.is_prefill:
                first = sequence.state.num_tokens
                ids = sequence.token_ids[first : first + item.num_prompt_tokens]
            else:
                ids = [sequence.token_ids[-1], *draft.chain.token_ids]
            segments.append((sequence.state, ids))
            end += len(ids)
            if not item.is_prefill:
                items.append(VerifyItem(sequence.sampler, draft.chain, len(rows)))
                rows.extend(range(end - len(ids), end))
            elif item.num_prompt_tokens == sequence.prefill_left:
                items.append(VerifyItem(sequence.sampler, DraftChain(), len(rows)))
                rows.append(end - 1)
        hidden, taps = self._model(StepBatch(segments, self._device), taps=reads.taps)
        found: Iterator[Verdict] = iter(self._verify(hidden, rows, items) if rows else ())
        verdicts = [
            next(found) if not item.is_prefill or item.num_prompt_tokens == item.sequence.prefill_left else None
            for item in work
        ]
        return StepOutcome(
            verdicts,
            [len(ids) for _, ids in segments],
            hidden if reads.hidden else None,
            torch.cat(taps, -1) if taps else None,
        )

    def _verify(self, hidden: torch.Tensor, rows: list[int], items: list[VerifyItem]) -> list[Verdict]:
        with self._counted("logits.verify", 4 * len(rows) * self._unused.vocab_size):
            logits = self._model.logits(hidden if len(rows) == hidden.shape[0] else hidden[rows])
            return verify_batch(logits, items, self._unused)

    def _counted(self, line: str, num_bytes: int) -> AbstractContextManager[None]:
        return self._arena.using(line, num_bytes) if self._arena is not None else nullcontext()
