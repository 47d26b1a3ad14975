"""nano's tokenizer and chat template: sizes, lossless bytes, copy-friendly splits, layout and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.nano.build_tokenizer import CONTROL_TOKENS, VOCAB_SIZE, build
from scripts.nano.corpus import MIX, make_document
from scripts.nano.dataset import load_tokenizer
from scripts.nano.lexicon import ASSET_DIR, Sampler
from scripts.nano.rendering import TemplateRefusal, render_text, template

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
SYSTEM = "<|agens_start|>system\nYou are Agens nano by Blockway.<|agens_end|>\n"
USER = "<|agens_start|>user\nHi<|agens_end|>\n"
OPEN = "<|agens_start|>assistant\n<|think|>"


def show(messages: list[dict[str, Any]], **variables: Any) -> str:
    return template().render(messages=messages, **variables)


def test_vocabulary():
    tokenizer = load_tokenizer()
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.id_to_token(i) for i in range(VOCAB_SIZE - len(CONTROL_TOKENS), VOCAB_SIZE)] == list(
        CONTROL_TOKENS
    )
    for token in CONTROL_TOKENS:
        assert tokenizer.encode(token).ids == [tokenizer.token_to_id(token)]
    config = json.loads((ASSET_DIR / "tokenizer_config.json").read_text())
    generation = json.loads((ASSET_DIR / "generation_config.json").read_text())
    assert config["eos_token"] == "<|agens_end|>" and config["pad_token"] == "<|endoftext|>"
    added = {int(i): entry["content"] for i, entry in config["added_tokens_decoder"].items()}
    assert added == {tokenizer.token_to_id(token): token for token in CONTROL_TOKENS}
    assert [tokenizer.id_to_token(i) for i in generation["eos_token_id"]] == ["<|agens_end|>", "<|endoftext|>"]


@pytest.mark.parametrize(
    "text", ["", "naïve café", "日本語 ☃ 🙂", "a\r\n\tb  c\n\n", "\x00\x7f", "<|think >", "x" * 500]
)
def test_any_text_survives(text: str):
    tokenizer = load_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_word_has_the_same_tokens_wherever_it_stands():
    tokenizer = load_tokenizer()
    sampler = Sampler(2, "train")
    for _ in range(300):
        word = sampler.pick((sampler.word(), sampler.name(), sampler.common()))
        alone = tokenizer.encode(word).ids
        for before, after in ((" ", "."), ("\n", "\n"), ('"', '"'), ("=", ","), ("(", ")"), ("/", "/")):
            assert tokenizer.encode(before + word + after).ids[1:-1] == alone, (before, word)
    assert len(tokenizer.encode("1234567").ids) == 7


def test_tokenizer_build_is_deterministic():
    assert build(2500).to_str() == build(2500).to_str()


def test_layout_with_and_without_thinking():
    assert show(HI, add_generation_prompt=True) == SYSTEM + USER + OPEN
    assert show(HI, add_generation_prompt=True, enable_thinking=False) == SYSTEM + USER + OPEN + "<|/think|>"
    custom = [{"role": "system", "content": "Be brief."}, *HI]
    assert show(custom) == "<|agens_start|>system\nBe brief.<|agens_end|>\n" + USER


def test_history_renders_reasoning_and_calls_parameter_by_parameter():
    arguments = {"city": "Oslo", "days": 3, "tags": ["a", "ü"], "ok": True, "none": None}
    messages = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Look it up.",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "get", "arguments": arguments}}],
        },
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": [{"type": "text", "text": "5"}]},
        {"role": "assistant", "content": "4 and 5"},
    ]
    assert show(messages) == (
        SYSTEM + USER + OPEN + "Look it up.<|/think|><|call|>\n<function=get>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=tags>\n[\"a\", \"ü\"]\n</parameter>\n<parameter=ok>\ntrue\n"
        "</parameter>\n<parameter=none>\nnull\n</parameter>\n</function>\n<|/call|><|agens_end|>\n"
        "<|agens_start|>user\n<|result|>4<|/result|><|result|>5<|/result|><|agens_end|>\n"
        + OPEN + "<|/think|>4 and 5<|agens_end|>\n"
    )  # fmt: skip
    assert "Look it up." not in show(messages, preserve_thinking=False)


def test_tools_stand_one_per_line_in_the_system_block_wrapped_or_bare():
    bare = {"name": "f", "description": "<ü & 'x'>", "parameters": {"type": "object", "properties": {}}}
    wrapped = {"type": "function", "function": bare}
    text = show(HI, tools=[wrapped, bare])
    line = '{"name": "f", "description": "<ü & \'x\'>", "parameters": {"type": "object", "properties": {}}}\n'
    assert text.startswith("<|agens_start|>system\n<tools>\n" + line + line + "</tools>\n")
    assert "You are Agens nano by Blockway.<|agens_end|>" in text
    assert show(HI, tools=[]) == show(HI, tools=None) == show(HI)


def test_content_forms_are_equal():
    forms = ["Hi", [{"type": "text", "text": "Hi"}], [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]]
    assert len({show([{"role": "user", "content": form}]) for form in forms}) == 1
    empty: list[dict[str, Any]] = [{"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": ""}]
    assert len({show([message]) for message in [*empty, {"role": "user", "content": []}]}) == 1


def test_effort_changes_only_low_and_only_with_thinking():
    plain = show(HI, add_generation_prompt=True)
    for effort in (None, "medium", "high", "xhigh"):
        assert show(HI, add_generation_prompt=True, reasoning_effort=effort) == plain
    low = show(HI, add_generation_prompt=True, reasoning_effort="low")
    assert low == plain.replace("system\n", "system\nThink briefly.\n", 1)
    off = {"add_generation_prompt": True, "enable_thinking": False}
    assert show(HI, reasoning_effort="low", **off) == show(HI, **off)


@pytest.mark.parametrize(
    ("messages", "variables", "words"),
    [
        (HI, {"reasoning_effort": "max"}, "reasoning_effort"),
        ([], {}, "at least one"),
        ([*HI, {"role": "system", "content": "x"}], {}, "first message"),
        ([{"role": "robot", "content": "x"}], {}, "unknown role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}, "text only"),
        ([{"role": "user", "content": 5}], {}, "content must be"),
        ([{"role": "user", "content": {"type": "text", "text": "x"}}], {}, "content must be"),
        ([*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}], {}, "object"),
    ],
)
def test_refusals(messages: list[dict[str, Any]], variables: dict[str, Any], words: str):
    with pytest.raises(TemplateRefusal, match=words):
        show(messages, **variables)


def test_merges_enforce_the_finer_split_on_generated_text():
    """No token of the shipped tokenizer mixes letters with anything else, so both splits give the same tokens."""
    tokenizer = load_tokenizer()
    for token_id in range(256, VOCAB_SIZE - len(CONTROL_TOKENS)):
        text = tokenizer.decode([token_id])
        assert text.isalpha() or not any(c.isalpha() or c.isdigit() for c in text), text
    sampler = Sampler(6, "train")
    for kind in MIX:
        ids = tokenizer.encode(render_text(make_document(sampler, kind))).ids
        assert max(ids) < VOCAB_SIZE


def test_serving_template_room_gives_the_training_prompt():
    """What the server will send is, token for token, what nano was trained on."""
    from agens_engine.text.template import ChatTemplate
    from agens_engine.text.tokenizer import Tokenizer

    serving = ChatTemplate.load(ASSET_DIR, Tokenizer.load(ASSET_DIR))
    sampler = Sampler(8, "train")
    for number in range(70):
        document = make_document(sampler, list(MIX)[number % len(MIX)])
        prompt = load_tokenizer().encode(render_text(document, prompt_only=True)).ids
        rendered = serving.render(
            document.messages[:-1],
            document.tools,
            enable_thinking=document.enable_thinking,
            reasoning_effort=document.reasoning_effort,
        )
        assert list(rendered.token_ids) == list(prompt)
        assert rendered.starts_in_reasoning == document.enable_thinking
