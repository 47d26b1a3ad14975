"""What a request resumes from, and what it leaves behind for the next turn (spec serving.md section 7).

Snapshots of a prompt are taken after whole chunks: every few thousand tokens, and once shortly before its end, where a
changed header or a stripped thought may begin (case G10); then at the end of the prompt and at the end of the answer.

    prompt of turn 1                         answer        new in turn 2
    |----S----|----S----|----S----|--s--|----S|===========S|-----------------|
         every SPACING_TOKENS        before   end          end: all but the last token, which has not run yet
                                     the end

A run resumed at a whole chunk sees the very pieces that a cold run sees, so asking the same thing twice gives the same
answer bit for bit (cases G8, G9). One resumed at the end of an answer goes on with a shorter first piece, up to the
next whole chunk; its numbers then differ from a cold run's by float32 rounding, as those of any two chunk sizes do.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agens_engine.errors import OutOfPages
from agens_engine.memory.session_files import SessionFiles, fingerprint
from agens_engine.memory.session_store import Entry, Prefix, SessionStore
from agens_engine.memory.snapshot import Snapshot
from agens_engine.memory.state import SequenceState, StatePool
from agens_engine.model.volundr import Volundr
from agens_engine.sequence import LiveSequence
from agens_engine.speculate.drafting import SlotFiller

log = logging.getLogger(__name__)

SPACING_TOKENS = 4096  # between snapshots of a long prompt, rounded up to whole chunks
FILES_PER_BUDGET = 8  # the folder of session files holds so many times the host budget
TAIL_TOKENS = 64  # the last one before the end of a prompt leaves at least so many


def open_session_files(folder: str | None, model_folder: Path, model: Volundr, budget: int) -> SessionFiles | None:
    """The files of `--session-dir`; None when none is asked for. Raises UsageError when it cannot be used."""
    if folder is None:
        return None
    dtype = str(model.model.norm.weight.dtype).removeprefix("torch.")
    limit = FILES_PER_BUDGET * budget
    return SessionFiles(folder, model=fingerprint(model_folder), dtype=dtype, limit_bytes=limit)


class Sessions:
    """The session cache of one engine; everything runs on the engine's thread.

    budget_bytes   of the host, for snapshots; 0 turns the cache off
    files          where evicted sessions and those left at the end go; None: they are lost
    """

    def __init__(
        self,
        pool: StatePool,
        filler: SlotFiller,
        *,
        chunk_tokens: int,
        budget_bytes: int,
        files: SessionFiles | None = None,
    ) -> None:
        self._pool, self._filler, self._files = pool, filler, files
        self._chunk = chunk_tokens
        self._spacing = -(-SPACING_TOKENS // chunk_tokens) * chunk_tokens
        self._largest = 0  # bytes of the largest snapshot so far: room for as much is made before the next one
        self.store = SessionStore(budget_bytes, files.save_later if files is not None else None)
        self.cached_tokens = self.computed_tokens = self.num_failed = 0
        self._closed = False
        pool.pages.on_shortage = self._give_pages

    @property
    def enabled(self) -> bool:
        return self.store.budget_bytes > 0

    def wants(self, sequence: LiveSequence) -> bool:
        """Whether this request takes part at all."""
        return self.enabled and sequence.request.cache_prompt

    # --- resuming ----------------------------------------------------------------------------------------------------

    def resume(self, sequence: LiveSequence) -> None:
        """Fill the fresh memory of a sequence with the longest stored prefix of its prompt, if there is one.

        At least the prompt's last token is left to compute: its logits choose the first token of the answer.
        """
        state, request = sequence.state, sequence.request
        assert state is not None and state.num_tokens == 0
        if not self.wants(sequence):
            return
        prompt = Prefix(sequence.token_ids[: sequence.prompt_len], request.image_keys)
        entry = self._find(prompt, sequence.prompt_len - 1)
        if entry is None:
            self.store.counts.misses += 1
            return
        entry.pinned = True
        try:
            state.restore(entry.memory)
        except OutOfPages as error:  # the prompt is computed, which fails in its turn if there really are none
            self._not_restored(entry, error)
            return
        except Exception as error:
            self._not_restored(entry, error)
            self.store.drop(entry)
            return
        finally:
            entry.pinned = False
        assert state.num_tokens == entry.num_tokens, (state.num_tokens, entry.num_tokens)  # G6
        self._filler.load(sequence, entry.drafters)
        sequence.cached_tokens = entry.num_tokens
        self.store.counts.hits += 1
        self.cached_tokens += entry.num_tokens

    def _not_restored(self, entry: Entry, error: Exception) -> None:
        """The state is as freshly created, so the request goes on from nothing."""
        self.num_failed += 1
        self.store.counts.misses += 1
        log.warning("a stored session of %d tokens could not be restored: %s", entry.num_tokens, error)

    def _find(self, prompt: Prefix, limit: int) -> Entry | None:
        found = self.store.find(prompt, limit)
        if self._files is None:
            return found
        name = self._files.find(prompt, limit)
        if name is None or (found is not None and found.num_tokens >= name[0]):
            return found
        loaded = self._files.load(name, prompt)
        return loaded if loaded is not None and self.store.put(loaded) else found

    # --- remembering -------------------------------------------------------------------------------------------------

    def remember(self, sequence: LiveSequence, *, ended: bool = False) -> None:
        """Store the sequence's committed memory, if it stands at a place worth it. Drafters must be up to date.

        A snapshot that cannot be taken costs the next turn its speed, and nobody else anything.
        """
        state = sequence.state
        if state is None or not self.wants(sequence):
            return
        if not (ended or self._is_boundary(state.num_tokens, sequence.prompt_len)):
            return
        try:
            self._take(sequence, state)
        except Exception:
            self.num_failed += 1
            log.warning("no snapshot of request %s at %d tokens", sequence.request_id, state.num_tokens, exc_info=True)

    def _take(self, sequence: LiveSequence, state: SequenceState) -> None:
        prefix = Prefix(sequence.token_ids[: state.num_tokens], sequence.request.image_keys)
        if self.store.has(prefix):
            return
        self.store.make_room(min(self._largest, self.store.budget_bytes))
        entry = Entry(prefix, state.snapshot(), self._filler.save(sequence))
        self._largest = max(self._largest, entry.num_bytes)
        if self.store.put(entry):
            self.store.counts.taken += 1

    def _is_boundary(self, position: int, prompt_len: int) -> bool:
        if position == prompt_len:
            return True
        if position > prompt_len or position % self._chunk:
            return False
        return position % self._spacing == 0 or position == (prompt_len - TAIL_TOKENS) // self._chunk * self._chunk

    def _give_pages(self, missing: int) -> None:
        pages = self._pool.pages
        wanted = pages.pages_free + missing
        self.store.give_pages(lambda: pages.pages_free >= wanted)

    # --- the rest ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The engine's loop is over: write what is worth it, give every page back."""
        if self._files is not None and not self._closed:
            self._files.close(self.store)
        self._closed = True
        self.store.clear()

    def snapshots(self) -> list[Snapshot]:
        return self.store.snapshots()

    def check(self) -> None:
        self.store.check()

    def stats(self) -> dict[str, Any]:
        """Counters and sizes, for health and metrics."""
        pages = self._pool.pages
        return {
            "enabled": self.enabled,
            "entries": len(self.store),
            "bytes": self.store.num_bytes,
            "budget_bytes": self.store.budget_bytes,
            "cached_prompt_tokens": self.cached_tokens,
            "computed_prompt_tokens": self.computed_tokens,
            **asdict(self.store.counts),
            "failed": self.num_failed,
            "pages_free": pages.pages_free,
            "pages": pages.num_pages,
            "files": len(self._files) if self._files is not None else 0,
            "files_written": self._files.num_written if self._files is not None else 0,
            "files_loaded": self._files.num_loaded if self._files is not None else 0,
            "files_ignored": self._files.num_ignored if self._files is not None else 0,
        }
