"""Draft sources for an engine: which ones, in which order, and how much of the vocabulary they may draft from."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from agens_engine.memory.arena import Arena
from agens_engine.memory.state import Claim
from agens_engine.model.dflash2 import DFlash2
from agens_engine.model.dflash2_config import TokenResolver
from agens_engine.model.drafter_ends import TargetEnds
from agens_engine.model.drafter_loading import DrafterFolders, load_dflash2, load_mtp
from agens_engine.model.mtp import MtpHead
from agens_engine.model.shortlist import Shortlist, recommended_ids
from agens_engine.model.volundr import Volundr
from agens_engine.speculate.context_copy import ContextCopy
from agens_engine.speculate.dflash import DFlashSource
from agens_engine.speculate.drafting import MAX_DRAFTS
from agens_engine.speculate.mtp import DRAFTS_BESIDE_A_BLOCK, MtpSource
from agens_engine.speculate.source import DraftSource

log = logging.getLogger(__name__)

SOURCE_NAMES = (ContextCopy.name, MtpSource.name, DFlashSource.name)  # the order in which they fill slots
SHORTLIST_TOKENS = 32_768


def num_usable(vocab_size: int, unused_ids: Iterable[int]) -> int:
    """Ids at or above this are never generated, so no drafter should score them."""
    unused, usable = set(unused_ids), vocab_size
    while usable - 1 in unused:
        usable -= 1
    return usable


def build_sources(
    ends: TargetEnds,
    *,
    names: Collection[str] = SOURCE_NAMES,
    head: MtpHead | None = None,
    drafter: DFlash2 | None = None,
    max_sequences: int,
    context_tokens: int,
    mtp_window_tokens: int | None = None,
    claim: Claim | None = None,
) -> list[DraftSource]:
    """The named sources whose networks are there, in slot order.

    raises   PlanError when the plan has no room for their context
    """
    block = mtp = None
    if drafter is not None and DFlashSource.name in names:
        block = DFlashSource(drafter, ends, max_sequences=max_sequences, context_tokens=context_tokens, claim=claim)
    if head is not None and MtpSource.name in names:
        # a head no larger than the list is scored whole, without a second copy of its rows
        listed = None
        if ends.num_usable > SHORTLIST_TOKENS:
            listed = Shortlist(ends, recommended_ids(ends.num_usable, (), SHORTLIST_TOKENS))
        mtp = MtpSource(
            head,
            ends,
            max_sequences=max_sequences,
            context_tokens=context_tokens,
            window=mtp_window_tokens,
            claim=claim,
            shortlist=listed,
            drafter=block,
        )
    copy = ContextCopy() if ContextCopy.name in names else None
    sources: list[DraftSource] = [source for source in (copy, mtp, block) if source is not None]
    log.info("draft sources: %s; %d slots a step", describe(sources), MAX_DRAFTS)
    return sources


def describe(sources: Collection[DraftSource]) -> str:
    """The sources with the most slots each may fill (case H17)."""
    block = next((s for s in sources if isinstance(s, DFlashSource)), None)
    most = {
        MtpSource.name: MAX_DRAFTS if block is None else DRAFTS_BESIDE_A_BLOCK,
        DFlashSource.name: 0 if block is None else block.num_slots,
    }
    return ", ".join(f"{s.name} (up to {most.get(s.name, MAX_DRAFTS)})" for s in sources) or "none"


def load_sources(
    folders: DrafterFolders,
    model: Volundr,
    *,
    names: Collection[str],
    unused_ids: Iterable[int],
    resolve_token: TokenResolver,
    max_sequences: int,
    context_tokens: int,
    mtp_window_tokens: int,
    arena: Arena,
) -> list[DraftSource]:
    """The named sources, their networks loaded from the folders where the plan has room for them.

    raises   CheckpointError for a drafter that is broken or made for another model, PlanError when a line is too small
    """
    device, head, drafter = model.model.norm.weight.device, None, None
    if folders.mtp is not None and "mtp.weights" in arena.lines:
        head = load_mtp(folders.mtp, model.config, device=device, adopt=arena.adopt)
    if folders.drafter is not None and "drafter.weights" in arena.lines:
        drafter = load_dflash2(
            folders.drafter, model.config, device=device, resolve_token=resolve_token, adopt=arena.adopt
        )
    return build_sources(
        TargetEnds.of(model, num_usable(model.config.vocab_size, unused_ids)),
        names=names,
        head=head,
        drafter=drafter,
        max_sequences=max_sequences,
        context_tokens=context_tokens,
        mtp_window_tokens=mtp_window_tokens,
        claim=arena.claim,
    )
