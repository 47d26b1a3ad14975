"""The `mtp` source: the head chains token after token from the target's last hidden state, all sequences at once.

    commit    true states of committed rows, with the token after each  ──► the head's K/V, and its newest state
    propose   consumes what other sources put into the first slots, then drafts; arg max, so a point mass

Beside a block drafter it drafts at most 4 tokens and leaves the rest to the block; alone it fills every slot. Each slot
chooses from a shortlist of the vocabulary, the block drafter's candidates for the slot, and the newest tokens of the
text that the shortlist lacks (control tokens get in that way: the chat template puts them into the prompt).
Source: spec drafters.md B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from agens_engine.core import DraftRun, StepResult
from agens_engine.memory.state import Claim, unplanned
from agens_engine.model.drafter_ends import TargetEnds
from agens_engine.model.mtp import HeadCache, MtpHead
from agens_engine.model.shortlist import Shortlist
from agens_engine.speculate.dflash import DFlashSource
from agens_engine.speculate.draft_memory import DraftMemory
from agens_engine.speculate.source import Ask, CommittedRows, DraftFault, Reads, SequenceView

DRAFTS_BESIDE_A_BLOCK = 4
LISTED_TEXT_TOKENS = 1024  # distinct unlisted tokens of a text that are listed for it, newest first to stay


@dataclass
class _HeadState:
    """One request. extra: unlisted tokens of its text, oldest first; num_seen: how much of the text is in it."""

    cache: HeadCache
    extra: dict[int, None] = field(default_factory=dict)
    extra_ids: torch.Tensor | None = None
    num_seen: int = 0


class MtpSource:
    """State per request: the head's K/V of committed rows.

    window      positions a row sees, at most the context
    shortlist   None: the whole usable vocabulary
    drafter     the block drafter of the same engine, whose candidates join the shortlist
    """

    name = "mtp"
    reads = Reads(hidden=True)

    def __init__(
        self,
        head: MtpHead,
        ends: TargetEnds,
        *,
        max_sequences: int,
        context_tokens: int,
        window: int | None = None,
        claim: Claim | None = None,
        shortlist: Shortlist | None = None,
        drafter: DFlashSource | None = None,
    ) -> None:
        block = head.config.block
        self.head, self._ends, self._drafter = head, ends, drafter
        self._device = head.norm.weight.device
        self._window = context_tokens if window is None else min(window, context_tokens)
        self.memory = DraftMemory(
            unplanned(self._device) if claim is None else claim,
            "mtp.context",
            num_slots=max_sequences,
            context_tokens=context_tokens,
            windows=(self._window,),
            temporary=0,
            kv_heads=block.num_kv_heads,
            head_dim=block.head_dim,
        )
        self._shortlist = Shortlist(ends) if shortlist is None else shortlist
        listed = self._shortlist.ids
        self._listed: frozenset[int] | None = None if listed is None else frozenset(listed.tolist())
        self._states: dict[str, _HeadState] = {}

    def begin(self, seq: SequenceView) -> None:
        storage = self.memory.take(seq.request_id)[0]
        self._states[seq.request_id] = _HeadState(self.head.new_cache(self._window, storage))

    def commit(self, rows: Sequence[CommittedRows]) -> None:
        caches, hidden = [], []
        for r in rows:
            assert r.hidden is not None, "this source reads hidden states"
            cache = self._states[r.seq.request_id].cache
            if cache.length != r.first:
                cache.restart(r.first)
            caches.append(cache)
            hidden.append(r.hidden)
        self.head.commit(caches, hidden, [r.next_ids for r in rows], self._ends)

    def prepare(self, asks: Sequence[Ask]) -> None:
        """Nothing is shared."""

    def propose(self, asks: Sequence[Ask]) -> list[DraftRun | DraftFault | None]:
        states = [self._states[ask.seq.request_id] for ask in asks]
        seqs = [ask.seq for ask in asks]
        wanted = [self._num_drafts(ask, state) for ask, state in zip(asks, states, strict=True)]
        listing = self._listed is not None
        chains = self.head.chain(
            [state.cache for state in states],
            wanted,
            self._ends,
            given=[ask.prefix for ask in asks],
            shortlist=self._shortlist,
            extra_ids=[self._extra_ids(ask.seq, s) for ask, s in zip(asks, states, strict=True)] if listing else None,
            slot_ids=self._drafter.candidate_ids(seqs) if listing and self._drafter is not None else None,
        )
        return [
            DraftRun(self.name, chain.tokens) if chain.ok else DraftFault("the draft scores are NaN or infinite")
            for chain in chains
        ]

    def _num_drafts(self, ask: Ask, state: _HeadState) -> int:
        if state.cache.length != len(ask.seq.token_ids) - 1:
            return 0  # rows are missing up to the anchor; the next commit brings it back on track
        beside = self._drafter is not None and self._drafter.takes_part(ask.seq)
        return min(ask.num_slots, DRAFTS_BESIDE_A_BLOCK) if beside else ask.num_slots

    def _extra_ids(self, seq: SequenceView, state: _HeadState) -> torch.Tensor:
        assert self._listed is not None
        new = [t for t in seq.token_ids[state.num_seen :] if t not in self._listed]
        state.num_seen = len(seq.token_ids)
        if new or state.extra_ids is None:
            for token in new:
                state.extra.pop(token, None)  # to the newest end
                state.extra[token] = None
            for token in list(state.extra)[: max(0, len(state.extra) - LISTED_TEXT_TOKENS)]:
                del state.extra[token]
            state.extra_ids = torch.tensor(list(state.extra), dtype=torch.long, device=self._device)
        return state.extra_ids

    def save(self, seq: SequenceView) -> dict[str, torch.Tensor]:
        """The head's committed rows, for a snapshot. The newest one knows the token after it, which a resumed text need
        not have: a slightly worse guess at most."""
        cache = self._states[seq.request_id].cache
        saved = {"length": torch.tensor(cache.length), **cache.kv.save(cache.length)}
        if cache.newest is not None:
            saved["newest"] = cache.newest.to("cpu", copy=True)
        return saved

    def load(self, seq: SequenceView, saved: Mapping[str, torch.Tensor]) -> None:
        """Go on from saved rows; those of another head are left alone, then the cache begins afresh."""
        cache = self._states[seq.request_id].cache
        if cache.kv.load(dict(saved)):
            newest = saved.get("newest")
            cache.length = int(saved["length"])
            cache.newest = None if newest is None else newest.to(self._device)

    def observe(self, seq: SequenceView, result: StepResult) -> None:
        """The committed rows say it all."""

    def end(self, seq: SequenceView) -> None:
        self._states.pop(seq.request_id, None)
        self.memory.give_back(seq.request_id)
