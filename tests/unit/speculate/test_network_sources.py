"""The two drafters as sources: the golden drafts come out of them, batches change nothing, switches and faults hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agens_engine.core import DraftRun, SamplingParams, StepResult
from agens_engine.model.dflash2 import DFlash2
from agens_engine.model.drafter_ends import TargetEnds
from agens_engine.model.drafter_loading import load_dflash2, load_mtp
from agens_engine.model.mtp import MtpHead
from agens_engine.model.shortlist import Shortlist
from agens_engine.sampling.seeds import Lane, RequestStream
from agens_engine.speculate.build import build_sources, describe, num_usable
from agens_engine.speculate.context_copy import ContextCopy
from agens_engine.speculate.dflash import DFlashSource
from agens_engine.speculate.drafting import SlotFiller
from agens_engine.speculate.mtp import MtpSource
from agens_engine.speculate.source import Ask, CommittedRows, DraftFault
from tests.drafterkit import random_dflash2, random_ends, random_mtp
from tests.modelkit import CPU, DATA, golden_model

FOLDER = DATA / "golden" / "drafters"
LENGTHS = (7, 64, 96)
GREEDY = SamplingParams(temperature=0.0)
ENDS = random_ends()
ROOM: dict[str, Any] = {"max_sequences": 4, "context_tokens": 600}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass
class Seq:
    token_ids: list[int]
    request_id: str = "r"
    sampling: SamplingParams = GREEDY
    num_output_tokens: int = 1
    stream: RequestStream = field(default_factory=lambda: RequestStream(5))

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids) - self.num_output_tokens


@cache
def ends() -> TargetEnds:
    return TargetEnds.of(golden_model())


@cache
def drafter() -> DFlash2:
    return load_dflash2(FOLDER / "dflash2", golden_model().config, device=CPU)


@cache
def head() -> MtpHead:
    return load_mtp(FOLDER / "mtp", golden_model().config, device=CPU)


def golden(name: str) -> dict[str, torch.Tensor]:
    return load_file(FOLDER / f"golden_{name}.safetensors")


def commit(source: Any, seq: Seq, hidden: torch.Tensor | None, taps: torch.Tensor | None, piece: int) -> None:
    """Hand over rows 0 .. in pieces, as prefill chunks and verify steps do; the anchor follows the last row."""
    ids = torch.tensor(seq.token_ids)
    for first in range(0, len(ids) - 1, piece):
        stop = min(first + piece, len(ids) - 1)
        parts = [None if x is None else x[first:stop] for x in (hidden, taps)]
        source.commit([CommittedRows(seq, first, parts[0], parts[1], ids[first + 1 : stop + 1])])


def tokens(run: DraftRun | DraftFault | None) -> tuple[int, ...]:
    assert isinstance(run, DraftRun), run
    return run.token_ids


# --- DFlash2 ---------------------------------------------------------------------------------------------------------


def golden_sequences(source: DFlashSource, piece: int) -> list[Seq]:
    stored, seqs = golden("dflash2"), []
    for n in LENGTHS:
        seq = Seq([*stored[f"ids_{n}"].tolist(), int(stored[f"anchor_{n}"])], str(n))
        source.begin(seq)
        commit(source, seq, None, stored[f"taps_{n}"], piece)
        seqs.append(seq)
    return seqs


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_dflash_gives_the_golden_drafts_in_one_batch(piece: int) -> None:
    stored, source = golden("dflash2"), DFlashSource(drafter(), ends(), **ROOM)
    asks = [Ask(seq, (), 7) for seq in golden_sequences(source, piece)]
    source.prepare(asks)
    for n, run in zip(LENGTHS, source.propose(asks), strict=True):
        assert tokens(run) == tuple(stored[f"greedy_{n}"].tolist())
        assert isinstance(run, DraftRun) and run.q is None and run.source == "dflash"
    listed = source.candidate_ids([ask.seq for ask in asks])
    assert listed is not None
    for n, row in zip(LENGTHS, listed, strict=True):
        assert row.tolist() == stored[f"candidates_{n}"].tolist()


def test_dflash_continues_from_the_last_filled_slot_and_stops_where_it_is_told() -> None:
    stored, source = golden("dflash2"), DFlashSource(drafter(), ends(), **ROOM)
    seqs = golden_sequences(source, 1000)
    source.prepare([Ask(seq, (), 7) for seq in seqs])
    asks = []
    for n, seq in zip(LENGTHS, seqs, strict=True):
        asks.append(Ask(seq, (3, 4, int(stored[f"tail_predecessor_{n}"])), 4))
    for n, run in zip(LENGTHS, source.propose(asks), strict=True):
        assert tokens(run) == tuple(stored[f"tail_greedy_{n}"].tolist())
    short = source.propose([Ask(asks[0].seq, asks[0].prefix, 2)])[0]
    assert tokens(short) == tuple(stored["tail_greedy_7"].tolist()[:2])


def test_h20_sampled_drafts_carry_the_q_they_were_drawn_from() -> None:
    """The golden q, and tokens that are the inverse of its running sum at the request's DRAFT numbers."""
    stored, source = golden("dflash2"), DFlashSource(drafter(), ends(), **ROOM)
    seqs = golden_sequences(source, 1000)
    for seq in seqs:
        seq.sampling, seq.num_output_tokens = SamplingParams(temperature=0.8), 3
    asks = [Ask(seq, (), 7) for seq in seqs]
    source.prepare(asks)
    for n, ask, run in zip(LENGTHS, asks, source.propose(asks), strict=True):
        assert isinstance(run, DraftRun) and run.q is not None
        vocab = drafter().config.vocab_size
        assert run.q.shape == (7, vocab) and run.q.dtype == np.float32
        uniforms = ask.seq.stream.uniforms(3, 7, Lane.DRAFT)
        candidates = stored[f"candidates_{n}"]
        # slot 0 follows the anchor in the golden walk as here; later slots follow this walk's own tokens
        assert np.abs(run.q[0, candidates[0].numpy()] - stored[f"q_{n}"][0].numpy()).max() < 1e-5
        for slot, token in enumerate(run.token_ids):
            q = run.q[slot, candidates[slot].numpy()].astype(np.float64)
            assert abs(q.sum() - 1.0) < 1e-5
            assert int((np.cumsum(q) <= uniforms[slot]).sum()) == candidates[slot].tolist().index(token)
    again = source.propose(asks)
    source.prepare(asks[1:2])
    alone = source.propose(asks[1:2])[0]
    assert tokens(alone) == tokens(again[1])


def test_dflash_says_nothing_while_rows_are_missing_and_recovers() -> None:
    source, model = DFlashSource(random_dflash2(), ENDS, **ROOM), random_dflash2()
    seq, gen = Seq([1] * 31), torch.Generator().manual_seed(1)
    source.begin(seq)
    rows = torch.randn((30, 96), generator=gen)
    ids = torch.zeros(5, dtype=torch.long)
    source.commit([CommittedRows(seq, 0, None, rows[:5], ids)])
    source.prepare([Ask(seq, (), 7)])
    assert source.propose([Ask(seq, (), 7)]) == [None] and source.candidate_ids([seq]) is None
    source.commit([CommittedRows(seq, 10, None, rows[10:], torch.zeros(20, dtype=torch.long))])
    source.prepare([Ask(seq, (), 7)])
    context = model.new_context()
    context.restart(10)
    model.extend([context], [rows[10:]])
    expected = model.walk(model.candidates(model.block([context], torch.tensor([1]), ENDS), ENDS), torch.tensor([1]))
    assert tokens(source.propose([Ask(seq, (), 7)])[0]) == tuple(expected.tokens[0].tolist())


def test_h12_h15_a_slot_given_to_the_next_request_holds_nothing_of_the_last() -> None:
    gen = torch.Generator().manual_seed(1)
    rows = torch.randn((9, 96), generator=gen)
    drafts = []
    for dirty in (False, True):
        source = DFlashSource(random_dflash2(), ENDS, max_sequences=1, context_tokens=64)
        if dirty:
            old = Seq([1] * 41, "old")
            source.begin(old)
            commit(source, old, None, torch.randn((40, 96), generator=gen), 8)
            source.end(old)
            source.end(old)
        seq = Seq([7] * 10, "new")
        source.begin(seq)
        commit(source, seq, None, rows, 4)
        source.prepare([Ask(seq, (), 7)])
        drafts.append(tokens(source.propose([Ask(seq, (), 7)])[0]))
        source.end(seq)
        source.memory.check()
    assert drafts[0] == drafts[1]


def test_h16_nan_in_one_sequence_is_a_fault_of_that_sequence() -> None:
    source = DFlashSource(random_dflash2(), ENDS, **ROOM)
    good, bad = Seq([1] * 9, "good"), Seq([1] * 9, "bad")
    rows = torch.randn((8, 96), generator=torch.Generator().manual_seed(1))
    for seq, taps in ((good, rows), (bad, torch.full_like(rows, torch.nan))):
        source.begin(seq)
        commit(source, seq, None, taps, 8)
    asks = [Ask(good, (), 7), Ask(bad, (), 7)]
    source.prepare(asks)
    one, two = source.propose(asks)
    assert len(tokens(one)) == 7 and isinstance(two, DraftFault) and "NaN" in two.reason


def test_plain_dflash_without_a_selector_drafts_each_slots_best_token() -> None:
    model = random_dflash2(features={})
    source, seq = DFlashSource(model, random_ends(num_usable=90), **ROOM), Seq([1] * 9)
    source.begin(seq)
    commit(source, seq, None, torch.randn((8, 96), generator=torch.Generator().manual_seed(1)), 8)
    ask = Ask(seq, (), 7)
    source.prepare([ask])
    best = source.candidate_ids([seq])
    assert best is not None and tokens(source.propose([ask])[0]) == tuple(best[0, :, 0].tolist())
    assert max(tokens(source.propose([ask])[0])) < 90


# --- MTP -------------------------------------------------------------------------------------------------------------


def head_sequences(source: MtpSource, piece: int) -> list[Seq]:
    stored, seqs = golden("mtp"), []
    for n in LENGTHS:
        seq = Seq([*stored[f"ids_{n}"].tolist(), int(stored[f"next_{n}"])], str(n))
        source.begin(seq)
        commit(source, seq, stored[f"target_hidden_{n}"], None, piece)
        seqs.append(seq)
    return seqs


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_mtp_gives_the_golden_chain_in_one_batch(piece: int) -> None:
    stored, source = golden("mtp"), MtpSource(head(), ends(), **ROOM)
    asks = [Ask(seq, (), 7) for seq in head_sequences(source, piece)]
    for n, run in zip(LENGTHS, source.propose(asks), strict=True):
        assert tokens(run) == tuple(stored[f"chain_tokens_{n}"].tolist())
        assert isinstance(run, DraftRun) and run.q is None


def test_mtp_consumes_what_was_copied_first() -> None:
    stored, source = golden("mtp"), MtpSource(head(), ends(), **ROOM)
    seqs = head_sequences(source, 1000)
    chains = [tuple(stored[f"chain_tokens_{n}"].tolist()) for n in LENGTHS]
    asks = [Ask(seq, chain[:k], 7 - k) for seq, chain, k in zip(seqs, chains, (2, 0, 6), strict=True)]
    for ask, chain, run in zip(asks, chains, source.propose(asks), strict=True):
        assert tokens(run) == chain[len(ask.prefix) :]


def test_mtp_drafts_four_beside_a_block_drafter_that_takes_part() -> None:
    block = DFlashSource(random_dflash2(), ENDS, **ROOM)
    source = MtpSource(random_mtp(), ENDS, **ROOM, drafter=block)
    with_block, without = Seq([1] * 9, "with"), Seq([1] * 9, "without")
    rows = torch.randn((8, 32), generator=torch.Generator().manual_seed(2))
    block.begin(with_block)
    for seq in (with_block, without):
        source.begin(seq)
        commit(source, seq, rows, None, 8)
    asks = [Ask(with_block, (), 7), Ask(without, (), 7), Ask(with_block, (5, 6), 2)]
    assert [len(tokens(run)) for run in source.propose(asks)] == [4, 7, 2]


def test_the_shortlist_is_joined_by_candidates_of_the_slot_and_tokens_of_the_text() -> None:
    """With ids 0..9 listed, a slot's best token comes in when the block drafter or the text has it, else it cannot."""
    model, rows = random_mtp(), torch.randn((8, 32), generator=torch.Generator().manual_seed(3))

    def first_draft(text: list[int], drafter: Any, listed: range | None) -> int:
        shortlist = None if listed is None else Shortlist(ENDS, listed)
        source = MtpSource(model, ENDS, **ROOM, shortlist=shortlist, drafter=drafter)
        seq = Seq(text)
        source.begin(seq)
        commit(source, seq, rows, None, 8)
        return tokens(source.propose([Ask(seq, (), 1)])[0])[0]

    class Candidates:
        def takes_part(self, seq: Any) -> bool:
            return True

        def candidate_ids(self, seqs: Sequence[Any]) -> torch.Tensor:
            return torch.tensor([[[best, -1]]] * len(seqs))

    # the rows' values and the anchor decide the draft; the rest of the text only decides what is listed
    best = first_draft([1] * 9, None, None)
    assert best >= 10
    assert first_draft([1] * 9, None, range(10)) < 10
    assert first_draft([1] * 9, Candidates(), range(10)) == best
    source = MtpSource(model, ENDS, **ROOM, shortlist=Shortlist(ENDS, range(10)))
    seq = Seq([1] * 9)
    source.begin(seq)
    commit(source, seq, rows, None, 8)
    seq.token_ids[2] = best  # seen before the anchor's rows were made: only the listing reads it
    assert tokens(source.propose([Ask(seq, (), 1)])[0]) == (best,)


def test_mtp_window_and_missing_rows() -> None:
    model, gen = random_mtp(), torch.Generator().manual_seed(4)
    rows = torch.randn((200, 32), generator=gen)
    source = MtpSource(model, ENDS, **ROOM, window=16)
    seq = Seq([1] * 201)
    source.begin(seq)
    commit(source, seq, rows, None, 5)
    cache = model.new_cache(16)
    model.commit([cache], [rows], [torch.ones(200, dtype=torch.long)], ENDS)
    expected = model.chain([cache], [7], ENDS)[0].tokens
    assert tokens(source.propose([Ask(seq, (), 7)])[0]) == expected
    seq.token_ids += [1, 1]
    (run,) = source.propose([Ask(seq, (), 7)])
    assert isinstance(run, DraftRun) and run.token_ids == ()


def test_mtp_nan_is_a_fault() -> None:
    source = MtpSource(random_mtp(), ENDS, **ROOM)
    seq = Seq([1] * 9)
    source.begin(seq)
    commit(source, seq, torch.full((8, 32), torch.nan), None, 8)
    (run,) = source.propose([Ask(seq, (), 7)])
    assert isinstance(run, DraftFault)


# --- together --------------------------------------------------------------------------------------------------------


def test_the_chain_is_copy_then_mtp_then_dflash_and_each_goes_on_from_the_one_before() -> None:
    model, block = random_mtp(), random_dflash2()
    sources = build_sources(ENDS, head=model, drafter=block, **ROOM)
    assert [s.name for s in sources] == ["copy", "mtp", "dflash"]
    assert describe(sources) == "copy (up to 7), mtp (up to 4), dflash (up to 7)"
    gen = torch.Generator().manual_seed(6)
    seq = Seq([1, 2, 3, 40, 41, 9, 8, 1, 2, 3])  # the copy after 1 2 3 is 40 41 9 8 1 2 3: cut to two by a policy

    class TwoCopies:
        def begin(self, seq: Any) -> None: ...

        def limits(self, seq: Any, names: Sequence[str], num_slots: int) -> dict[str, int]:
            return {name: 2 if name == "copy" else num_slots for name in names}

        def observe(self, *args: Any) -> None: ...

        def end(self, seq: Any) -> None: ...

        def summary(self) -> dict[str, Any]:
            return {}

    filler = SlotFiller(sources, 96, TwoCopies())
    filler.begin(seq)
    hidden, taps = torch.randn((9, 32), generator=gen), torch.randn((9, 96), generator=gen)
    filler.commit([CommittedRows(seq, 0, hidden, taps, torch.tensor(seq.token_ids[1:]))])
    drafted = filler.fill([Ask(seq, (), 7)])[0]
    copied, chained, walked = drafted.chain.runs
    assert (copied.source, copied.token_ids) == ("copy", (40, 41))
    cache = model.new_cache()
    model.commit([cache], [hidden], [torch.tensor(seq.token_ids[1:])], ENDS)
    assert chained.token_ids == model.chain([cache], [4], ENDS, given=[(40, 41)])[0].tokens
    context = block.new_context()
    block.extend([context], [taps])
    anchor = torch.tensor([3])
    candidates = block.candidates(block.block([context], anchor, ENDS), ENDS)
    last = torch.tensor([chained.token_ids[-1]])
    assert walked.token_ids == tuple(block.walk(candidates, last, torch.tensor([6])).tokens[0, 6:].tolist())
    assert set(drafted.seconds) == {"copy", "mtp", "dflash"}
    filler.observe(seq, StepResult(drafted.chain, (40, 5), 1), drafted, None)  # type: ignore[arg-type]
    filler.end(seq)
    assert filler.num_failures == {"copy": 0, "mtp": 0, "dflash": 0}


def test_what_is_built_follows_names_and_networks() -> None:
    def built(**options: Any) -> list[str]:
        return [s.name for s in build_sources(ENDS, **ROOM, **options)]

    assert built() == ["copy"] and built(names=()) == []
    assert built(head=random_mtp(), names={"mtp", "dflash"}) == ["mtp"]
    assert built(head=random_mtp(), drafter=random_dflash2(), names={"dflash"}) == ["dflash"]
    assert describe([]) == "none" and describe([ContextCopy()]) == "copy (up to 7)"


def test_ids_at_the_end_that_are_never_generated_are_not_scored() -> None:
    assert num_usable(96, []) == 96 and num_usable(96, [95, 94, 50]) == 94 and num_usable(96, [3]) == 96


def test_taps_of_two_sources_must_agree() -> None:
    class Other:
        name, reads = "other", type("R", (), {"taps": (0,), "hidden": False})()

    block = DFlashSource(random_dflash2(), ENDS, **ROOM)
    with pytest.raises(ValueError, match="different taps"):
        SlotFiller([block, Other()], 96)  # type: ignore[list-item]
