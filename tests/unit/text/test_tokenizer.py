"""Loading a tokenizer, and what may and may not become a control token (cases J17, C1; spec serving.md section 1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agens_engine.errors import CheckpointError
from agens_engine.text.tokenizer import AGENS_CONTROLS, Tokenizer
from tests.textkit import load_kit, native, tokenizer_json, write_model_dir

NANO_DIR = Path(__file__).parents[3] / "agens_engine" / "assets" / "nano"
TOK, _ = load_kit()


@pytest.fixture(scope="module", params=["kit", "nano"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOK if request.param == "kit" else Tokenizer.load(NANO_DIR)


def load_changed(folder: Path, **changes: Any) -> Tokenizer:
    return Tokenizer.load(write_model_dir(folder, tokenizer_json() | changes))


def test_j17_missing_tokenizer_names_folder_and_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_j17_missing_control_tokens_are_listed(tmp_path: Path) -> None:
    kept = [t for t in tokenizer_json()["added_tokens"] if t["content"] not in ("<|call|>", "<|/think|>")]
    for i, token in enumerate(kept):
        token["id"] = kept[0]["id"] + i
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json() | {"added_tokens": kept}))
    with pytest.raises(CheckpointError, match=r"<\|/think\|>, <\|call\|>"):
        Tokenizer.load(tmp_path)


def test_j17_tokenizer_that_does_not_round_trip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="returns it unchanged"):
        load_changed(tmp_path, normalizer={"type": "Lowercase"})


def test_j17_other_kinds_of_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="byte-level BPE"):
        load_changed(tmp_path, pre_tokenizer={"type": "Whitespace"}, decoder=None)


def test_damaged_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_control_texts_become_ids_only_where_allowed(tokenizer: Tokenizer) -> None:
    for text in AGENS_CONTROLS.all():
        control_id = tokenizer.id_of(text)
        assert control_id is not None and tokenizer.is_special(control_id)
        assert tokenizer.encode(f"a{text}b", allow_control=True).count(control_id) == 1
        ids = tokenizer.encode(f"a{text}b", allow_control=False)
        assert not tokenizer.control_ids & set(ids)
        assert tokenizer.decode(ids, skip_special=False) == f"a{text}b"


def test_ordinary_text_is_tokenised_as_the_shipped_tokenizer_does(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox, <b>42</b> | 東京 🦊\n\n  x"
    assert tokenizer.encode(text, allow_control=False) == native(tokenizer, text)


def test_control_tokens_inside_the_vocabulary_are_guarded_too(tmp_path: Path) -> None:
    """Some trainers number the control tokens inside the model's vocabulary."""
    spec = tokenizer_json()
    for token in spec["added_tokens"]:
        spec["model"]["vocab"][token["content"]] = token["id"]
    spec["model"]["ignore_merges"] = True  # whole words are looked up in the vocabulary
    tokenizer = Tokenizer.load(write_model_dir(tmp_path, spec))
    assert tokenizer.encode("<|call|>", allow_control=True) == [tokenizer.call_start_id]
    assert not tokenizer.control_ids & set(tokenizer.encode("<|call|>", allow_control=False))


def test_an_ordinary_added_word_keeps_its_id_in_client_text(tmp_path: Path) -> None:
    spec = tokenizer_json()
    word = {"id": spec["added_tokens"][-1]["id"] + 1, "content": "Blockway", "special": False, "normalized": False}
    word |= {"single_word": False, "lstrip": False, "rstrip": False}
    tokenizer = Tokenizer.load(write_model_dir(tmp_path, spec | {"added_tokens": [*spec["added_tokens"], word]}))
    ids = tokenizer.encode("a Blockway <|call|>", allow_control=False)
    assert word["id"] in ids and not tokenizer.is_special(word["id"])
    assert tokenizer.decode(ids) == "a Blockway <|call|>"


def test_token_bytes_concatenate_to_the_text(tokenizer: Tokenizer) -> None:
    text = "Grüße 🦊 <|think|>\t東京"
    assert b"".join(tokenizer.token_bytes(i) for i in native(tokenizer, text)) == text.encode()


def test_every_byte_has_a_token_and_unknown_ids_are_empty(tokenizer: Tokenizer) -> None:
    found = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    # Bytes that never occur in UTF-8 may be missing from a vocabulary.
    assert {bytes([b]) for b in range(256) if b not in (0xC0, 0xC1) and b < 0xF5} <= found
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b"" == tokenizer.token_bytes(-1)


def test_decode_skips_control_tokens_on_request(tokenizer: Tokenizer) -> None:
    ids = native(tokenizer, "a<|think|>b<|agens_end|>")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "a<|think|>b<|agens_end|>"


def test_half_a_surrogate_pair_becomes_a_replacement_character(tokenizer: Tokenizer) -> None:
    for allow_control in (True, False):
        assert tokenizer.decode(tokenizer.encode("a\ud83db", allow_control=allow_control)) == "a\ufffdb"


def test_end_tokens_are_the_union_of_all_sources(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path)
    generation = {"eos_token_id": 7, "do_sample": False, "temperature": 0.6, "suppress_tokens": [3, 4]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|/result|>"}}))
    tokenizer = Tokenizer.load(folder)
    named = {tokenizer.id_of(t) for t in ("<|agens_end|>", "<|endoftext|>", "<|/result|>")}
    assert tokenizer.end_token_ids == named | {7}
    assert tokenizer.default_sampling == {"temperature": 0.0}  # do_sample false is greedy
    assert tokenizer.suppress_ids == (3, 4)


@pytest.mark.parametrize("bad", [{"eos_token_id": "x"}, {"eos_token_id": [True]}, {"temperature": "hot"}])
def test_bad_generation_config_is_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    folder = write_model_dir(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(bad))
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        Tokenizer.load(folder)


def test_nano_recommends_sampling_and_has_no_sampling_without_the_file(tmp_path: Path) -> None:
    assert Tokenizer.load(NANO_DIR).default_sampling["top_k"] == 20
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    bare = Tokenizer.load(tmp_path)
    assert bare.default_sampling == {} and bare.end_token_ids == TOK.end_token_ids
