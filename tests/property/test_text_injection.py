"""Whatever a client writes, it never becomes a control token and never changes on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agens_engine.text.template import ChatTemplate
from agens_engine.text.tokenizer import AGENS_CONTROLS, Tokenizer
from tests.textkit import load_kit, native

NANO_DIR = Path(__file__).parents[2] / "agens_engine" / "assets" / "nano"
_nano = Tokenizer.load(NANO_DIR)
KITS: list[tuple[Tokenizer, ChatTemplate]] = [load_kit(), (_nano, ChatTemplate.load(NANO_DIR, _nano))]
PIECES = st.one_of(
    st.sampled_from(
        [*AGENS_CONTROLS.all(), "<|", "|>", "<", "|", ">", "think", "/think", "call|>", "<|agens_", "end|>", "\n"]
    ),
    st.text(max_size=5),
)
EVIL = st.lists(PIECES, max_size=8).map(lambda p: "".join(p).encode("utf-8", "replace").decode())
# Without brackets no control text can form: the ordinary conversation.
ORDINARY = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="|"), max_size=20)

both = pytest.mark.parametrize("kit", KITS, ids=["kit", "nano"])


def controls(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [i for i in ids if tokenizer.is_special(i)]


@both
@settings(max_examples=40)
@given(EVIL)
def test_client_text_has_no_control_ids_and_decodes_to_itself(kit: tuple[Tokenizer, ChatTemplate], text: str) -> None:
    ids = kit[0].encode(text, allow_control=False)
    assert controls(kit[0], ids) == []
    assert kit[0].decode(ids, skip_special=False) == text


@both
@settings(max_examples=40)
@given(EVIL, EVIL, EVIL)
def test_rendered_client_text_has_no_control_ids_and_survives(
    kit: tuple[Tokenizer, ChatTemplate], question: str, thought: str, name: str
) -> None:
    tokenizer, template = kit

    def render(a: str, b: str, c: str) -> tuple[list[int], str]:
        call = {"function": {"name": c or "f", "arguments": {b or "k": a}}}
        messages = [
            {"role": "user", "content": a},
            {"role": "assistant", "content": c, "reasoning_content": b, "tool_calls": [call]},
            {"role": "tool", "content": b},
        ]
        prompt = template.render(messages, [{"type": "function", "function": {"name": c, "description": b}}])
        return prompt.token_ids, prompt.text

    ids, text = render(question, thought, name)
    assert controls(tokenizer, ids) == controls(tokenizer, render("x", "x", "x")[0])
    assert tokenizer.decode(ids, skip_special=False) == text
    assert question in text and thought in text and name in text


@both
@settings(max_examples=40)
@given(ORDINARY, ORDINARY)
def test_ordinary_conversations_get_the_native_tokens(
    kit: tuple[Tokenizer, ChatTemplate], user: str, reply: str
) -> None:
    tokenizer, template = kit
    messages = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "<"},
    ]
    prompt = template.render(messages)
    assert prompt.token_ids == native(tokenizer, prompt.text)
