"""The suffix index and the copy source against brute force, on short alphabets where matches abound."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from agens_engine.core import DraftRun, SamplingParams
from agens_engine.sampling.seeds import RequestStream
from agens_engine.speculate import suffix_index
from agens_engine.speculate.context_copy import ContextCopy
from agens_engine.speculate.source import Ask
from agens_engine.speculate.suffix_index import MAX_MATCH, MIN_MATCH, SuffixIndex


def brute_force_find(text: list[int], suffix: list[int], min_match: int = MIN_MATCH) -> tuple[int, int] | None:
    """Longest match first, then the latest end; ends lie before the newest token of the text."""
    for length in range(min(MAX_MATCH, len(suffix)), min_match - 1, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == suffix[-length:]:
                return length, end
    return None


def brute_force_copy(text: list[int], prefix: list[int], num_slots: int) -> tuple[int, ...] | None:
    known = text + prefix
    match = brute_force_find(text, (text[-MAX_MATCH:] + prefix)[-MAX_MATCH:])
    if match is None:
        return None
    for i in range(num_slots):
        known.append(known[match[1] + 1 + i])
    return tuple(known[-num_slots:])


TEXT = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n), max_size=120))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXT, st.integers(0, 120), st.integers(MIN_MATCH, MAX_MATCH))
def test_find_equals_brute_force_at_every_length(text, num_at_once, min_match):
    """A prompt indexed at once, then token by token."""
    index = SuffixIndex(text[:num_at_once])
    for num in range(min(num_at_once, len(text)), len(text) + 1):
        if num > len(index):
            index.extend(text[len(index) : num])
        assert index.find(text[max(num - MAX_MATCH, 0) : num], min_match) == brute_force_find(
            text[:num], text[max(num - MAX_MATCH, 0) : num], min_match
        )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TEXT, st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_find_equals_brute_force_with_growth_and_mixed_pieces(text, pieces):
    old, suffix_index._MIN_CAPACITY = suffix_index._MIN_CAPACITY, 2  # grow often
    try:
        index = SuffixIndex()
        for piece in pieces:
            index.extend(text[len(index) : len(index) + piece])
            seen = text[: len(index)]
            assert index.tokens(0, len(seen)) == seen
            assert index.find(seen[-MAX_MATCH:]) == brute_force_find(seen, seen[-MAX_MATCH:])
    finally:
        suffix_index._MIN_CAPACITY = old


@dataclass
class Seq:
    token_ids: list[int]
    request_id: str = "r"
    prompt_len: int = 0
    num_output_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: RequestStream = field(default_factory=lambda: RequestStream(0))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXT, st.lists(st.integers(0, 2), max_size=6), st.integers(1, 7))
def test_copy_equals_brute_force(text, prefix, num_slots):
    copy = ContextCopy()
    seq = Seq(list(text[: len(text) // 2]))
    copy.begin(seq)
    for token in text[len(text) // 2 :]:
        seq.token_ids.append(token)
        (run,) = copy.propose([Ask(seq, tuple(prefix), num_slots)])
        assert run is None or isinstance(run, DraftRun)
        assert (run.token_ids if run else None) == brute_force_copy(seq.token_ids, prefix, num_slots)
