"""The generator: deterministic, arithmetic that is right, held-out keys kept out, documents that fit and render."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from scripts.nano.corpus import MAKERS, MIX, make_document
from scripts.nano.dataset import MAX_DOCUMENT_TOKENS, build, generated_flags, join, load_tokenizer, render
from scripts.nano.kinds import arithmetic
from scripts.nano.lexicon import Sampler, is_held
from scripts.nano.rendering import render_text


@pytest.mark.parametrize("op", ["+", "-", "*"])
def test_written_steps_are_true_and_end_at_the_result(op: str):
    sampler = Sampler(1, "train")
    for _ in range(2000):
        a, b = arithmetic._numbers(sampler, op)
        thought = arithmetic.steps(a, op, b)
        assert thought.startswith(f"{a}{op}{b}: ")
        assert int(thought.rsplit("-> ", 1)[1]) == arithmetic.result_of(a, op, b)
        claims = re.findall(r"(?<![\d*+-])(\d+(?:[-+*]\d+)+)=(\d+)", thought)
        assert claims
        for expression, value in claims:
            assert eval(expression) == int(value), thought


def test_steps_look_as_documented():
    assert arithmetic.steps(427, "+", 86) == "427+86: 7+6+0=13 -> 3; 2+8+1=11 -> 13; 4+0+1=5 -> 513"
    assert arithmetic.steps(63, "-", 7) == "63-7: 13-7-0=6 -> 6; 6-0-1=5 -> 56"
    assert arithmetic.steps(63, "*", 7) == "63*7: 3*7=21, 21+0=21 -> 1; 6*7=42, 42+2=44 -> 441"


@pytest.mark.parametrize("kind", list(MAKERS))
def test_documents_render_encode_and_flag_exactly_the_assistant_turns(kind: str):
    tokenizer = load_tokenizer()
    sampler = Sampler(5, "train")
    for _ in range(150):
        document = make_document(sampler, kind)
        text = render_text(document)
        ids, weights = render(document, tokenizer)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        prompt = tokenizer.encode(render_text(document, prompt_only=True)).ids
        assert ids[: len(prompt)] == prompt, "the prompt must be a token prefix of the document"
        assert weights[len(prompt) - 1 :] == [0.0] + [1.0] * (len(ids) - len(prompt) - 1) + [0.0]
        opened = "<|think|>" if document.enable_thinking else "<|think|><|/think|>"
        turns = re.findall(rf"<\|agens_start\|>assistant\n{re.escape(opened)}(.*?<\|agens_end\|>)", text, re.DOTALL)
        assert sum(m["role"] == "assistant" for m in document.messages) == len(turns)
        spans = [tokenizer.encode(turn).ids for turn in turns]
        assert [i for i, w in zip(ids, weights, strict=True) if w] == [i for span in spans for i in span]


def test_training_never_uses_held_out_keys_and_the_other_split_always_does():
    train, heldout = Sampler(1, "train"), Sampler(1, "heldout")
    for _ in range(1500):
        for draw, category in (("word", "word"), ("name", "name"), ("city", "city")):
            assert not is_held(category, getattr(train, draw)())
            assert is_held(category, getattr(heldout, draw)())
    for sampler, held in ((train, False), (heldout, True)):
        for _ in range(500):
            document = make_document(sampler, "arithmetic")
            e = document.expect
            single = max(e["a"], e["b"]) < 10
            assert is_held("numbers", f"{e['a']}{e['op']}{e['b']}") == held or (single and not held)
            for spec_pair in _pairs(sampler):
                assert is_held("pair", spec_pair) == held


def _pairs(sampler: Sampler) -> list[str]:
    from scripts.nano.kinds.toolbox import make_spec

    spec = make_spec(sampler, fixed_pair=True)
    return [] if spec.noun == "math" else [f"{spec.verb} {spec.noun}"]


def test_shards_are_deterministic_whole_and_follow_the_mix():
    shard, again, other = build(3, 60_000), build(3, 60_000), build(4, 60_000)
    assert (shard["ids"] == again["ids"]).all() and (shard["weights"] == again["weights"]).all()
    assert len(shard["ids"]) != len(other["ids"]) or (shard["ids"] != other["ids"]).any()
    lengths = [int(b - a) for a, b in pairwise(shard["offsets"])]
    assert max(lengths) <= MAX_DOCUMENT_TOKENS and sum(lengths) == len(shard["ids"]) >= 60_000
    tokenizer = load_tokenizer()
    start, end = tokenizer.token_to_id("<|agens_start|>"), tokenizer.token_to_id("<|agens_end|>")
    assert all(shard["ids"][at] == start for at in shard["offsets"][:-1])
    assert all(shard["ids"][at - 2] == end for at in shard["offsets"][1:])
    large = build(3, 250_000)  # the mix is corrected after every batch of documents, so it takes a few to settle
    tokens: Counter[str] = Counter()
    for kind, length in zip(large["kinds"], np.diff(large["offsets"]).tolist(), strict=True):
        tokens[str(large["kind_names"][kind])] += length
    for kind, percent in MIX.items():
        assert abs(100 * tokens[kind] / tokens.total() - percent) < 1.5
    both = join([shard, other])
    at = len(shard["offsets"]) - 1
    assert (both["ids"][both["offsets"][at] : both["offsets"][at + 1]] == other["ids"][: other["offsets"][1]]).all()


def test_flags_with_thinking_off_leave_out_the_closed_block():
    tokenizer = load_tokenizer()
    ids = tokenizer.encode("<|agens_start|>assistant\n<|think|><|/think|>ok<|agens_end|>\n").ids
    on, off = generated_flags(ids, tokenizer, True), generated_flags(ids, tokenizer, False)
    assert sum(on) == sum(off) + 1 and on[-1] == off[-1] == 0 and on[-2] == off[-2] == 1
