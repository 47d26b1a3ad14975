"""Characters are never split (case C1)."""

from __future__ import annotations

from agens_engine.text.detokenizer import Detokenizer


def test_c1_emoji_over_two_tokens_is_held_until_complete() -> None:
    fox = "🦊".encode()
    detokenizer = Detokenizer()
    assert detokenizer.push(b"ok " + fox[:2]) == "ok "
    assert detokenizer.push(fox[2:]) == "🦊"
    assert detokenizer.finish() == ""


def test_c1_unfinished_character_at_the_end_is_one_replacement() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.push("🦊".encode()[:3]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_impossible_bytes_are_replaced_at_once() -> None:
    detokenizer = Detokenizer()
    assert detokenizer.push(b"a\xffb\xc3") == "a\ufffdb"
    assert detokenizer.push(b"z") == "\ufffdz"
