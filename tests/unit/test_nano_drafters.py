"""The drafters shipped with nano: they load, they draft what nano says, and their trainer sees what the engine runs."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from agens_engine.model.dflash2 import DFlash2
from agens_engine.model.drafter_ends import TargetEnds
from agens_engine.model.drafter_loading import load_dflash2, load_mtp
from agens_engine.model.mtp import MtpHead
from agens_engine.model.volundr import Volundr
from scripts.nano import drafter_data
from scripts.nano.dataset import load_tokenizer
from scripts.nano.drafter_data import Anchors, Documents, make_folder
from scripts.nano.drafter_losses import BlockTrainee, ChainTrainee
from scripts.nano.evaluate import heldout_cases
from scripts.nano.generation import greedy_backend, load_volundr
from scripts.nano.train_drafters import MAX_BYTES, NANO, dflash2_config, mtp_config

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # states of size 1 .. 10 in float32, summed in another order
KINDS = ("chat", "python", "tools", "agent")
BLOCK_FLOOR, CHAIN_FLOOR = 4.0, 2.5  # accepted drafts per step, at most 7 and 4; 5.9 and 3.4 when they were shipped


@pytest.fixture(scope="module", autouse=True)
def _weights() -> None:
    """Loaded outside of any test's inference mode: two tests want gradients."""
    _ = ends(), drafter(), head()


@cache
def nano() -> Volundr:
    return load_volundr(NANO).requires_grad_(False)


@cache
def ends() -> TargetEnds:
    return TargetEnds.of(nano())


@cache
def drafter() -> DFlash2:
    return load_dflash2(NANO / "drafter", nano().config, device=CPU)


@cache
def head() -> MtpHead:
    return load_mtp(NANO / "mtp", nano().config, device=CPU)


@cache
def stops() -> frozenset[int]:
    return frozenset(load_tokenizer().encode("<|agens_end|><|endoftext|>").ids)


@cache
def answered() -> list[tuple[int, torch.Tensor]]:
    """Held-out prompts with nano's greedy answers: where the answer begins, and all ids."""
    prompts = [case.prompt_ids for case in heldout_cases(seed=17, per_kind=1, kinds=KINDS)]
    answers = greedy_backend(nano(), max_tokens=60, stop_ids=stops())(prompts)
    return [(len(p), torch.tensor(p + a)) for p, a in zip(prompts, answers, strict=True)]


def test_they_are_small_and_match_their_trainer() -> None:
    assert sum((NANO / part / "model.safetensors").stat().st_size for part in ("drafter", "mtp")) <= MAX_BYTES
    assert json.loads((NANO / "drafter" / "config.json").read_text(encoding="utf-8")) == dflash2_config()
    assert json.loads((NANO / "mtp" / "config.json").read_text(encoding="utf-8")) == mtp_config()


def test_they_fit_nano() -> None:
    config = drafter().config
    assert len(config.layers) == 2 and config.conv_kernel and config.selector_rank and config.num_slots == 7
    assert load_tokenizer().id_to_token(config.mask_token_id) == "<|MASK|>"
    assert head().config.block.hidden_size == nano().config.hidden_size


def accepted_per_step(drafts_at, start: int, ids: torch.Tensor) -> list[int]:
    """Follow the answer as verification would; drafts_at(P) gives the tokens drafted behind the anchor at P."""
    accepted, anchor, last = [], start, len(ids) - 1
    while anchor < last:
        drafts, truth = drafts_at(anchor), ids[anchor + 1 :].tolist()
        right = next((i for i, (a, b) in enumerate(zip(drafts, truth, strict=False)) if a != b), len(truth))
        accepted.append(min(right, len(drafts)))
        anchor += accepted[-1] + 1
    return accepted


@torch.inference_mode()
def test_the_block_drafts_what_nano_says() -> None:
    accepted: list[int] = []
    for start, ids in answered():
        _, taps = nano()(nano().fresh_batch(ids[None]), taps=drafter().config.target_layer_ids)
        rows, context = torch.cat(taps, -1), drafter().new_context()

        def drafts_at(anchor: int, rows=rows, context=context, ids=ids) -> list[int]:
            drafter().extend([context], [rows[context.length : anchor]])
            found = drafter().candidates(drafter().block([context], ids[anchor : anchor + 1], ends()), ends())
            return drafter().walk(found, ids[anchor : anchor + 1]).tokens[0].tolist()

        accepted += accepted_per_step(drafts_at, start, ids)
    assert sum(accepted) / len(accepted) > BLOCK_FLOOR


@torch.inference_mode()
def test_the_chain_drafts_what_nano_says() -> None:
    accepted: list[int] = []
    for start, ids in answered():
        hidden, _ = nano()(nano().fresh_batch(ids[None]))
        cache_ = head().new_cache()

        def drafts_at(anchor: int, hidden=hidden, cache=cache_, ids=ids) -> tuple[int, ...]:
            fresh = slice(cache.length, anchor)
            head().commit([cache], [hidden[fresh]], [ids[fresh.start + 1 : anchor + 1]], ends())
            return head().chain([cache], [4], ends())[0].tokens

        accepted += accepted_per_step(drafts_at, start, ids)
    assert sum(accepted) / len(accepted) > CHAIN_FLOOR


# --- the trainer's view -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    out: Path = tmp_path_factory.mktemp("documents")
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(drafter_data, "PIECE_DOCUMENTS", 4)
        mix = {"chat": 1.0, "copying": 1.0, "json": 1.0}
        make_folder(nano(), out, seed=3, split="heldout", num_tokens=1, mix=mix)
    return Documents([out])


def every_anchor(documents: Documents, slots: int) -> Anchors:
    docs = list(range(len(documents)))
    return documents.batch(docs, [documents.any_turn(doc) for doc in docs], slots)


def test_last_turns_are_nanos_own_greedy_answers(documents: Documents) -> None:
    generate = greedy_backend(nano(), max_tokens=drafter_data.MAX_NEW_TOKENS, stop_ids=stops())
    rows, starts = [], []
    for doc in range(len(documents)):
        rows.append(documents.column(doc, "ids").tolist())
        starts.append(int(documents.last_turn(doc)[0]))
    answers = generate([ids[:start] for ids, start in zip(rows, starts, strict=True)])
    assert answers == [ids[start:] for ids, start in zip(rows, starts, strict=True)]


def test_targets_end_with_the_turn_and_behind_a_word_nano_would_not_say(tmp_path: Path) -> None:
    """Two turns, 2 .. 5 and 8 .. 9; nano agrees with every word but the one at position 4."""
    ids = np.arange(10, dtype=np.uint16)
    predicted = ids + 1
    predicted[3] = 99
    ends_at = np.array([-1, -1, 5, 5, 5, 5, -1, -1, 9, 9])
    np.savez(
        tmp_path / "documents.npz",
        ids=ids,
        predicted=predicted,
        turn_end=ends_at,
        offsets=np.array([0, 10]),
        kinds=np.array([0]),
        kind_names=np.array(["chat"]),
        thinking=np.array([False]),
    )
    np.save(tmp_path / "states.npy", np.zeros((10, 4), np.float16))
    made_up = Documents([tmp_path])
    assert made_up.any_turn(0).tolist() == [2, 3, 4, 8] and made_up.last_turn(0).tolist() == [8]
    targets, valid = made_up.targets(0, made_up.any_turn(0), 3)
    drafted = [row[mask].tolist() for row, mask in zip(targets, valid, strict=True)]
    assert drafted == [[3, 99], [99], [5], [9]]
    assert all(mask[: mask.sum()].all() for mask in valid)


@torch.inference_mode()
def test_the_block_in_training_is_the_block_of_the_engine(documents: Documents) -> None:
    batch = every_anchor(documents, 7)
    trained = BlockTrainee(drafter(), ends()).hidden(batch)
    for doc, turn in enumerate(documents.any_turn(d) for d in range(len(documents))):
        for column in range(0, len(turn), 9):
            anchor, context = int(turn[column]), drafter().new_context()
            drafter().extend([context], [batch.taps[doc, :anchor]])
            hidden = drafter().block([context], batch.ids[doc, anchor : anchor + 1], ends())[0]
            torch.testing.assert_close(trained[doc, column], hidden, atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_the_chain_in_training_is_the_chain_of_the_engine(documents: Documents) -> None:
    batch = every_anchor(documents, 5)
    trained = ChainTrainee(head(), ends(), 5).states(batch)
    for doc, turn in enumerate(documents.any_turn(d) for d in range(len(documents))):
        for column in range(0, len(turn), 9):
            anchor, cache_ = int(turn[column]), head().new_cache()
            head().commit([cache_], [batch.hidden[doc, :anchor]], [batch.ids[doc, 1 : anchor + 1]], ends())
            given = batch.targets[doc, column].tolist()
            for step in range(5):
                chain = head().chain([cache_], [1], ends(), given=[given[:step]])[0]
                torch.testing.assert_close(trained[doc, column, step], chain.hidden[0], atol=TOLERANCE, rtol=TOLERANCE)


def test_the_losses_reach_every_weight(documents: Documents) -> None:
    batch = next(documents.epoch(seed=1, number=0, num_docs=3, num_anchors=4, slots=7))
    trainees = BlockTrainee(copy.deepcopy(drafter()), ends()), ChainTrainee(copy.deepcopy(head()), ends(), 7)
    for trainee in trainees:
        trainee.network.requires_grad_(True)
        trainee.loss(batch).backward()
        for name, p in trainee.network.named_parameters():
            assert p.grad is not None and p.grad.abs().max() > 0, name
