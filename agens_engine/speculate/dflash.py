"""The `dflash` source: one block forward drafts all slots, a selector walk fills those that are left.

    commit    taps of committed rows    ──► drafter context
    prepare   anchors of the step       ──► block and candidates, once for all sequences; MTP may list the candidates
    propose   last filled slot onwards  ──► walk; tokens, and the walk's own distributions when the request samples

A request with a seed gets the greedy walk, a point mass: then its text depends on the seed alone and not on how many
slots the policy gave to whom, which depends on measured time (case I3's other half: a seed repeats).
Source: spec drafters.md A and B.4. Without a selector (plain DFlash) the walk takes each slot's best token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agens_engine.core import NUM_VERIFY_ROWS, DraftRun, StepResult
from agens_engine.memory.state import Claim, unplanned
from agens_engine.model.dflash2 import Candidates, DFlash2, DraftContext, Walk
from agens_engine.model.drafter_ends import TargetEnds
from agens_engine.sampling.seeds import Lane
from agens_engine.speculate.draft_memory import DraftMemory
from agens_engine.speculate.source import Ask, CommittedRows, DraftFault, Reads, SequenceView


@dataclass(frozen=True)
class _Ahead:
    """Candidates of the step, and which row of them belongs to which request."""

    candidates: Candidates
    rows: dict[str, int]


class DFlashSource:
    """State per request: the context K/V of its committed rows.

    max_sequences, context_tokens   what the storage is claimed for
    claim                           None: outside any plan
    """

    name = "dflash"

    def __init__(
        self,
        drafter: DFlash2,
        ends: TargetEnds,
        *,
        max_sequences: int,
        context_tokens: int,
        claim: Claim | None = None,
    ) -> None:
        c = drafter.config
        self.drafter, self._ends = drafter, ends
        self.reads = Reads(taps=tuple(c.target_layer_ids))
        self._device = drafter.norm.weight.device
        self.memory = DraftMemory(
            unplanned(self._device) if claim is None else claim,
            "drafter.context",
            num_slots=max_sequences,
            context_tokens=context_tokens,
            windows=tuple(kind.window for kind in c.layers),
            temporary=c.block_size,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
        )
        self.num_slots = min(c.num_slots, NUM_VERIFY_ROWS - 1)
        self._contexts: dict[str, DraftContext] = {}
        self._ahead: _Ahead | None = None

    def begin(self, seq: SequenceView) -> None:
        self._contexts[seq.request_id] = self.drafter.new_context(self.memory.take(seq.request_id))

    def commit(self, rows: Sequence[CommittedRows]) -> None:
        contexts, taps = [], []
        for r in rows:
            assert r.taps is not None, "this source reads taps"
            context = self._contexts[r.seq.request_id]
            if context.length != r.first:
                context.restart(r.first)
            contexts.append(context)
            taps.append(r.taps)
        self.drafter.extend(contexts, taps)

    def prepare(self, asks: Sequence[Ask]) -> None:
        """Run the block of every sequence whose context is complete up to its anchor."""
        self._ahead = None
        live = [ask for ask in asks if self._contexts[ask.seq.request_id].length == len(ask.seq.token_ids) - 1]
        if not live:
            return
        anchors = torch.tensor([ask.seq.token_ids[-1] for ask in live], device=self._device)
        hidden = self.drafter.block([self._contexts[ask.seq.request_id] for ask in live], anchors, self._ends)
        needed = min(self.num_slots, max(len(ask.prefix) + ask.num_slots for ask in live))
        candidates = self.drafter.candidates(hidden, self._ends, needed)
        self._ahead = _Ahead(candidates, {ask.seq.request_id: row for row, ask in enumerate(live)})

    def takes_part(self, seq: SequenceView) -> bool:
        """Whether this source drafts for the request at all."""
        return seq.request_id in self._contexts

    def candidate_ids(self, seqs: Sequence[SequenceView]) -> torch.Tensor | None:
        """[B, S, k] ids this step's block holds likely per slot, -1 for sequences without; None when none has any."""
        ahead = self._ahead
        if ahead is None or not any(seq.request_id in ahead.rows for seq in seqs):
            return None
        best = ahead.candidates.best_ids()
        none = best.new_full(best.shape[1:], -1)
        rows = [ahead.rows.get(seq.request_id) for seq in seqs]
        return torch.stack([none if row is None else best[row] for row in rows])

    def propose(self, asks: Sequence[Ask]) -> list[DraftRun | DraftFault | None]:
        ahead = self._ahead
        num_slots = 0 if ahead is None else ahead.candidates.ids.shape[1]
        runs: list[DraftRun | DraftFault | None] = [None] * len(asks)
        walked = [
            i
            for i, ask in enumerate(asks)
            if ahead is not None and ask.seq.request_id in ahead.rows and len(ask.prefix) < num_slots
        ]
        if ahead is None or not walked:
            return runs
        walk = self._walk([asks[i] for i in walked], ahead)
        ok = walk.ok.tolist()
        for row, i in enumerate(walked):
            runs[i] = self._run(asks[i], walk, row) if ok[row] else DraftFault("the draft scores are NaN or infinite")
        return runs

    def _walk(self, asks: Sequence[Ask], ahead: _Ahead) -> Walk:
        rows = torch.tensor([ahead.rows[ask.seq.request_id] for ask in asks], device=self._device)
        all_rows = ahead.candidates
        mine = Candidates(
            all_rows.ids[rows], all_rows.unary[rows], None if all_rows.gate is None else all_rows.gate[rows]
        )
        before = [ask.prefix[-1] if ask.prefix else ask.seq.token_ids[-1] for ask in asks]
        predecessors = torch.tensor(before, device=self._device)
        first_slots = torch.tensor([len(ask.prefix) for ask in asks], device=self._device)
        sampling = [_samples(ask.seq) for ask in asks]
        if not any(sampling):
            return self.drafter.walk(mine, predecessors, first_slots)
        uniforms = np.zeros((len(asks), mine.ids.shape[1]))
        for row, ask in enumerate(asks):
            if sampling[row]:
                uniforms[row] = ask.seq.stream.uniforms(ask.seq.num_output_tokens, uniforms.shape[1], Lane.DRAFT)
        temperatures = [ask.seq.sampling.temperature if s else 0.0 for ask, s in zip(asks, sampling, strict=True)]
        return self.drafter.walk(
            mine,
            predecessors,
            first_slots,
            temperatures=torch.tensor(temperatures, device=self._device),
            uniforms=torch.from_numpy(uniforms).to(self._device),
        )

    def _run(self, ask: Ask, walk: Walk, row: int) -> DraftRun:
        first = len(ask.prefix)
        tokens = tuple(walk.tokens[row, first : first + ask.num_slots].tolist())
        if not _samples(ask.seq):
            return DraftRun(self.name, tokens)
        q = walk.dense_q(row, first, self.drafter.config.vocab_size)[: len(tokens)]
        return DraftRun(self.name, tokens, q.cpu().numpy())

    def save(self, seq: SequenceView) -> dict[str, torch.Tensor]:
        """The context of the committed rows, for a snapshot."""
        context = self._contexts[seq.request_id]
        saved = {"length": torch.tensor(context.length)}
        for index, layer in enumerate(context.layers):
            saved |= {f"{index}.{key}": value for key, value in layer.save(context.length).items()}
        return saved

    def load(self, seq: SequenceView, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on from a saved context; one of another drafter is left alone, then the context begins afresh."""
        context = self._contexts[seq.request_id]
        for index, layer in enumerate(context.layers):
            if not layer.load({key: saved[name] for key in ("rows", "at") if (name := f"{index}.{key}") in saved}):
                context.restart(0)
                return
        context.length = int(saved["length"])

    def observe(self, seq: SequenceView, result: StepResult) -> None:
        """The committed rows say it all."""

    def end(self, seq: SequenceView) -> None:
        self._contexts.pop(seq.request_id, None)
        self.memory.give_back(seq.request_id)
        self._ahead = None


def _samples(seq: SequenceView) -> bool:
    return not seq.sampling.greedy and seq.sampling.seed is None
