"""Builds nano's tokenizer: byte-level BPE, 768 entries, control tokens last.

Training splits the text finer than the shipped pattern does: letter runs stand alone and digits are single, so no
merge mixes letters with spaces or punctuation. The shipped pattern is the family's usual one; the merges keep the
finer split, and a word has the same tokens after a space, a newline or a quote, which makes copying learnable.

    python scripts/nano/build_tokenizer.py [--documents 20000]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.nano import corpus, rendering
from scripts.nano.lexicon import ASSET_DIR, Sampler

VOCAB_SIZE = 768
CONTROL_TOKENS = (
    "<|endoftext|>", "<|agens_start|>", "<|agens_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<|call|>", "<|/call|>", "<|result|>", "<|/result|>", "<|think|>", "<|/think|>", "<|MASK|>",
)  # fmt: skip
FAMILY_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# one entry per kind and turn: weights close to the mix, counted in documents
KINDS = ["tools", "tools", "copying", "copying", "copying", "arithmetic", "agent", "json", "chat", "python"]


def training_text(num_documents: int) -> Iterator[str]:
    """Rendered documents cut at control tokens, which BPE must not see."""
    control = re.compile("|".join(re.escape(token) for token in CONTROL_TOKENS))
    for document in corpus.documents(Sampler(0, "train", pieces=False), KINDS, num_documents):
        yield from (piece for piece in control.split(rendering.render_text(document)) if piece)


def build(num_documents: int) -> Tokenizer:
    """Train on the generator's own text and add the control tokens at the end of the id range."""
    tokenizer = Tokenizer(models.BPE())
    family = pre_tokenizers.Split(Regex(FAMILY_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    finer = pre_tokenizers.Split(Regex(r"\p{L}+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([family, finer, to_bytes])  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(num_documents), trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([family, to_bytes])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(
            f"the tokenizer has {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}; use more documents"
        )
    return tokenizer


def write(tokenizer: Tokenizer) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into the package."""
    tokenizer.save(str(ASSET_DIR / "tokenizer.json"), pretty=False)
    ids = {token: tokenizer.token_to_id(token) for token in CONTROL_TOKENS}
    added = {
        str(ids[token]): {
            "content": token, "special": True, "normalized": False,
            "lstrip": False, "rstrip": False, "single_word": False,
        }
        for token in CONTROL_TOKENS
    }  # fmt: skip
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|agens_end|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation = {
        "do_sample": True,
        "eos_token_id": [ids["<|agens_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "suppress_tokens": [],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (ASSET_DIR / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=20000, help="documents to train on")
    tokenizer = build(parser.parse_args().documents)
    write(tokenizer)
    print(f"{tokenizer.get_vocab_size()} entries written to {ASSET_DIR}")


if __name__ == "__main__":
    main()
