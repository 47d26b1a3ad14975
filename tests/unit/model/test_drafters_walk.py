"""The selector walk: slots, predecessors, exact q, ties, NaN; plain DFlash; the shortlist of the MTP head."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from agens_engine.model.dflash2 import Candidates
from agens_engine.model.shortlist import Shortlist, recommended_ids
from agens_kernels.ref.selector import choose
from tests.drafterkit import random_dflash2, random_ends, random_mtp


def some_candidates(batch: int = 3, slots: int = 7, top: int = 6, seed: int = 0) -> Candidates:
    gen = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(96, generator=gen)[:top] for _ in range(batch * slots)])
    unary = torch.randn((batch, slots, top), generator=gen).sort(-1, descending=True).values
    return Candidates(ids.view(batch, slots, top), unary, torch.randn((batch, slots, 12), generator=gen))


def test_every_first_slot_equals_the_tail_of_the_sliced_block() -> None:
    model, found = random_dflash2(), some_candidates(8)
    anchors = torch.arange(8)
    walk = model.walk(found, anchors, torch.arange(8))
    assert (walk.tokens[7] == -1).all() and (walk.q[7] == 0).all()
    for row in range(7):
        assert found.gate is not None
        tail = Candidates(found.ids[row, None, row:], found.unary[row, None, row:], found.gate[row, None, row:])
        alone = model.walk(tail, anchors[row : row + 1])
        assert walk.tokens[row].tolist() == [-1] * row + alone.tokens[0].tolist()


def test_greedy_is_the_best_scored_path_and_a_point_mass() -> None:
    model, found = random_dflash2(), some_candidates(1)
    selector = model.candidate_selector
    assert selector is not None and found.gate is not None
    walk, previous = model.walk(found, torch.tensor([5])), 5
    for slot in range(7):
        pair = [
            float(u) + float((selector.predecessor_codebook[previous] * g * selector.successor_codebook[i]).sum())
            for u, i, g in zip(found.unary[0, slot], found.ids[0, slot], itertools.repeat(found.gate[0, slot]))
        ]
        best = max(range(6), key=pair.__getitem__)
        previous = int(found.ids[0, slot, best])
        assert int(walk.tokens[0, slot]) == previous
        assert walk.q[0, slot].tolist() == [float(i == best) for i in range(6)]


def test_the_tokens_are_distributed_as_q_says() -> None:
    """Every uniform of a fine grid: each candidate is taken q of the time."""
    gen = torch.Generator().manual_seed(3)
    scores = torch.randn(6, generator=gen).expand(20_000, 6)
    uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    index, q = choose(scores, torch.full((20_000,), 0.7), uniforms)
    share = torch.bincount(index, minlength=6) / 20_000
    assert torch.equal(q[0], (scores[0] / 0.7).softmax(-1))
    assert float((share - q[0]).abs().max()) <= 1.5 / 20_000
    wrong = (scores[0] / 0.8).softmax(-1)  # the comparison can fail
    assert float((share - wrong).abs().max()) > 0.005


def test_edges_of_the_inverse_cumulative() -> None:
    scores = torch.tensor([[0.0, 0.0, -1e9, -1e9]]).expand(4, 4)
    uniforms = torch.tensor([0.0, 0.5, 1.0 - 1e-16, 0.4999], dtype=torch.float64)
    index, q = choose(scores, torch.ones(4), uniforms)
    assert index.tolist() == [0, 1, 1, 0]  # a cumulative sum equal to the uniform is passed; weight 0 never drawn
    index, _ = choose(scores.flip(-1), torch.ones(4), uniforms)
    assert index.tolist() == [2, 3, 3, 2]
    # a tiny temperature is raised, and then as good as greedy; 0 is greedy, the first of equals
    cold = torch.tensor([[1.0, 1.0, 0.9]])
    index, q = choose(cold, torch.zeros(1), torch.zeros(1))
    assert index.tolist() == [0] and q.tolist() == [[1.0, 0.0, 0.0]]
    _, q = choose(cold, torch.tensor([1e-30]), torch.zeros(1))
    assert q.tolist() == [[0.5, 0.5, 0.0]]


def test_greedy_and_sampled_rows_side_by_side() -> None:
    model, found = random_dflash2(), some_candidates(2)
    uniforms = torch.rand((2, 7), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    anchors = torch.tensor([1, 2])
    walk = model.walk(found, anchors, temperatures=torch.tensor([0.0, 1.0]), uniforms=uniforms)
    assert torch.equal(walk.tokens[0], model.walk(found, anchors).tokens[0])
    assert walk.q[1].max() < 1.0 and torch.allclose(walk.q.sum(-1), torch.ones(2, 7))
    with pytest.raises(AssertionError, match="needs uniforms"):
        model.walk(found, anchors, temperatures=torch.tensor([0.0, 1.0]))


def test_dense_q() -> None:
    found = some_candidates(2)
    walk = random_dflash2().walk(
        found, torch.tensor([1, 2]), torch.tensor([0, 4]), temperatures=torch.ones(2), uniforms=torch.rand(2, 7)
    )
    dense = walk.dense_q(1, 4, 96)
    assert dense.shape == (3, 96) and torch.allclose(dense.sum(-1), torch.ones(3))
    for row, slot in enumerate(range(4, 7)):
        assert torch.equal(dense[row, found.ids[1, slot]], walk.q[1, slot])
        assert dense[row, walk.tokens[1, slot]] > 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_score_silences_only_its_sequence(poison: float) -> None:
    model, found = random_dflash2(), some_candidates(3)
    clean = model.walk(found, torch.arange(3))
    found.unary[1, 2, 4] = poison
    walk = model.walk(found, torch.arange(3))
    assert walk.ok.tolist() == [True, False, True]
    assert (walk.tokens[1] == -1).all()
    assert torch.equal(walk.tokens[[0, 2]], clean.tokens[[0, 2]])
    late = model.walk(found, torch.arange(3), torch.tensor([0, 3, 0]))  # the bad slot belongs to another source
    assert late.ok.all()


def test_candidates_skip_unusable_ids_and_scale() -> None:
    hidden = torch.randn((2, 8, 32), generator=torch.Generator().manual_seed(0))
    ends = random_ends(num_usable=40)
    plain = random_dflash2().candidates(hidden, ends, 3)
    assert plain.ids.shape == (2, 3, 6) and int(plain.ids.max()) < 40
    logits = ends.head(hidden[0, 1:4])[:, :40]
    assert torch.allclose(plain.unary[0], logits.topk(6).values, atol=1e-5)  # another batch size, other rounding
    scaled = random_dflash2(output_multiplier=0.5, final_logit_softcapping=2.0).candidates(hidden, ends, 3)
    assert torch.equal(scaled.ids, plain.ids)
    assert torch.allclose(scaled.unary, 2 * torch.tanh(plain.unary * 0.5 / 2), atol=1e-6)
    few = random_dflash2().candidates(hidden, random_ends(num_usable=4), 3)
    assert few.ids.shape[-1] == 4
    assert torch.equal(plain.best_ids(2), plain.ids[..., :2])


def test_plain_dflash_chooses_from_the_whole_vocabulary() -> None:
    model, ends = random_dflash2(features={}), random_ends(num_usable=90)
    hidden = torch.randn((1, 8, 32), generator=torch.Generator().manual_seed(0))
    found = model.candidates(hidden, ends)
    logits = ends.head(hidden[0, 1:])[:, :90]
    greedy = model.walk(found, torch.tensor([3]))
    assert greedy.tokens[0].tolist() == logits.argmax(-1).tolist()
    assert found.best_ids()[0].tolist() == logits.topk(16).indices.tolist()
    walk = model.walk(found, torch.tensor([3]), temperatures=torch.tensor([2.0]), uniforms=torch.rand(1, 7))
    assert torch.allclose(walk.dense_q(0, 0, 96)[:, :90], (logits / 2).softmax(-1), atol=1e-6)


# --- shortlist --------------------------------------------------------------------------------------------------------


def test_recommended_ids() -> None:
    assert recommended_ids(90, [95, 89, 3], size=4) == [0, 1, 2, 3, 89]
    assert recommended_ids(3, []) == [0, 1, 2]


def test_the_shortlist_is_the_best_of_what_is_listed() -> None:
    ends = random_ends(num_usable=90)
    hidden = torch.randn((40, 32), generator=torch.Generator().manual_seed(0))
    logits = ends.head(hidden)
    listed = [7, 3, 50, 3]
    extra = [torch.randint(0, 96, (n % 5,), generator=torch.Generator().manual_seed(n)) for n in range(40)]
    ids, ok = Shortlist(ends, listed).best(hidden, extra)
    assert ok.all()
    for row in range(40):
        allowed = sorted({3, 7, 50, *(i for i in extra[row].tolist() if i < 90)})
        assert int(ids[row]) == max(allowed, key=lambda i: float(logits[row, i]))
    alone, _ = Shortlist(ends, listed).best(hidden)
    assert not torch.equal(ids, alone)
    full, _ = Shortlist(ends).best(hidden)
    assert torch.equal(full, logits[:, :90].argmax(-1))
    with pytest.raises(ValueError, match="within 0..89"):
        Shortlist(ends, [90])


def test_equal_scores_go_to_the_lowest_id() -> None:
    rows = torch.ones((96, 32))
    ends = dataclasses.replace(random_ends(), head=lambda h: h @ rows.T, head_rows=lambda ids: rows[ids])
    hidden = torch.ones((2, 32))
    ids, _ = Shortlist(ends, [9, 5]).best(hidden, [torch.tensor([4, 2]), torch.tensor([7])])
    assert ids.tolist() == [2, 5]


def test_bad_scores_are_reported_per_row() -> None:
    ends = random_ends()
    hidden = torch.ones((3, 32))
    hidden[1, 0] = float("nan")
    for extra in (None, [torch.tensor([5])] * 3):
        assert Shortlist(ends, [1, 2]).best(hidden, extra)[1].tolist() == [True, False, True]
    assert Shortlist(ends).best(hidden)[1].tolist() == [True, False, True]


def test_slot_candidates_reach_only_their_slot() -> None:
    head, ends = random_mtp(), random_ends()
    cache = head.new_cache()
    gen = torch.Generator().manual_seed(0)
    head.commit([cache], [torch.randn((5, 32), generator=gen)], [torch.arange(5)], ends)
    free = head.chain([cache], [3], ends)[0].tokens
    assert len(set(free)) == 3
    base = [i for i in range(96) if i not in free]
    tight = Shortlist(ends, base)
    slot_ids = torch.full((1, 7, 1), base[0])
    slot_ids[0, 0, 0] = free[0]
    first = head.chain([cache], [3], ends, shortlist=tight, slot_ids=slot_ids)[0].tokens
    assert first[0] == free[0] and first[1] != free[1]
    both = head.chain([cache], [3], ends, shortlist=tight, extra_ids=[torch.tensor(free[1:])], slot_ids=slot_ids)
    assert both[0].tokens == free
