"""Text to token ids and back, for a byte-level BPE checkpoint (spec serving.md, section 1).

    full    the tokenizer exactly as shipped: control texts become control ids
    plain   the same merges with the control tokens taken out of it: it cannot produce a control id, whatever it is fed

What a client wrote goes through `plain`; only the template's own text (and raw prompts that ask for it) goes through
`full`. Ids are always looked up by text; the numbers in the spec are not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tokenizers

from agens_engine.errors import CheckpointError

# A reserved token is a control token when it is flagged special or is written like a tag. (Families differ in which of
# their tags carry the flag; an unflagged, untagged entry is an ordinary word that someone added.)
_TAG_RE = re.compile(r"<[^<>\s]+>")
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MARKER = "Agens 42 ✓ 🦊\n"


@dataclass(frozen=True)
class ControlTexts:
    """The control tokens a chat needs, by their text."""

    end_of_text: str = "<|endoftext|>"
    turn_start: str = "<|agens_start|>"
    turn_end: str = "<|agens_end|>"
    think_start: str = "<|think|>"
    think_end: str = "<|/think|>"
    call_start: str = "<|call|>"
    call_end: str = "<|/call|>"
    result_start: str = "<|result|>"
    result_end: str = "<|/result|>"

    def all(self) -> tuple[str, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))


AGENS_CONTROLS = ControlTexts()


class Tokenizer:
    """One checkpoint's tokenizer. Immutable after loading, safe to share between threads.

    vocab_size        highest id + 1 (the embedding may have more rows; those are never generated)
    control_ids       ids of all control tokens; reserved_texts their texts
    end_token_ids     ids that end an answer: generation_config, tokenizer_config and the family's two end tokens
    default_sampling  what generation_config.json recommends, in SamplingParams' words
    suppress_ids      ids generation_config.json says are never to be generated
    special_texts     tokenizer_config's bos_token, eos_token, ... as text, for the template
    """

    def __init__(
        self,
        model_dir: Path,
        spec: dict[str, Any],
        generation: dict[str, Any],
        config: dict[str, Any],
        texts: ControlTexts,
    ) -> None:
        """The parsed files of one folder; use `load`."""
        self.model_dir = model_dir
        self.control_texts = texts
        added = [t for t in spec.get("added_tokens") or [] if isinstance(t, dict)]
        self._control_ids_by_text: dict[str, int] = {
            t["content"]: int(t["id"]) for t in added if t.get("special") or _TAG_RE.fullmatch(t["content"])
        }
        self.reserved_texts = tuple(self._control_ids_by_text)
        self.control_ids = frozenset(self._control_ids_by_text.values())
        self._word_ids_by_text = {t["content"]: int(t["id"]) for t in added}
        for text in self._control_ids_by_text:
            del self._word_ids_by_text[text]
        self._added_texts = {int(t["id"]): str(t["content"]) for t in added}
        self._full, self._plain = _build_pair(model_dir / "tokenizer.json", spec)
        ids = self._full.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        self._control_re = _alternation(self._control_ids_by_text)
        self._word_re = _alternation(self._word_ids_by_text)
        self._bytes_cache: dict[int, bytes] = {}
        self._check()

        self.think_start_id = self._control_ids_by_text[texts.think_start]
        self.think_end_id = self._control_ids_by_text[texts.think_end]
        self.call_start_id = self._control_ids_by_text[texts.call_start]
        self.call_end_id = self._control_ids_by_text[texts.call_end]
        named = {name: _text_of(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self.special_texts = {name: text for name, text in named.items() if text}
        self.end_token_ids = self._find_end_ids(generation)
        self.default_sampling = _default_sampling(generation, model_dir / "generation_config.json")
        self.suppress_ids = tuple(_int_list(generation.get("suppress_tokens"), "suppress_tokens", model_dir))

    @classmethod
    def load(cls, model_dir: str | Path, *, texts: ControlTexts = AGENS_CONTROLS) -> Tokenizer:
        """Read tokenizer.json and, where present, generation_config.json and tokenizer_config.json.

        raises  CheckpointError: no tokenizer.json, not a byte-level BPE, a control token missing, or the marker text
                does not survive encode and decode
        """
        folder = Path(model_dir)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no tokenizer.json; copy the one shipped with the model into it")
        return cls(
            folder,
            read_json(path),
            read_json(folder / "generation_config.json", missing_ok=True),
            read_json(folder / "tokenizer_config.json", missing_ok=True),
            texts,
        )

    def encode(self, text: str, *, allow_control: bool, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`.

        allow_control       True: control texts become control ids (template text, raw prompts)
                            False: they are encoded as ordinary characters, so that no control id can come out
        add_special_tokens  True: also what the tokenizer's own post-processor adds (usually nothing in this family)
        """
        text = _replace_lone_surrogates(text)
        if allow_control:
            return list(self._full.encode(text, add_special_tokens=add_special_tokens).ids)
        ids: list[int] = []
        for piece, word_id in _split(text, self._word_re, self._word_ids_by_text):
            if word_id is not None:
                ids.append(word_id)
            else:
                ids.extend(self._plain.encode(piece, add_special_tokens=False).ids)
        return ids

    def split_control(self, text: str) -> list[tuple[str, int | None]]:
        """Cut `text` at its control texts: pieces in order, each with its id if it is a control text."""
        return list(_split(text, self._control_re, self._control_ids_by_text))

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of one token; an id that the tokenizer does not have gives b""."""
        found = self._bytes_cache.get(token_id)
        if found is None:
            if token_id in self._added_texts:
                found = self._added_texts[token_id].encode()
            else:
                token = self._full.id_to_token(token_id) if token_id >= 0 else None
                found = b"" if token is None else bytes(_BYTE_OF_CHAR[c] for c in token)
            self._bytes_cache[token_id] = found
        return found

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `token_ids`; broken UTF-8 becomes U+FFFD. skip_special leaves out the control tokens."""
        kept = (t for t in token_ids if not (skip_special and t in self.control_ids))
        return b"".join(self.token_bytes(t) for t in kept).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self.control_ids

    def id_of(self, text: str) -> int | None:
        """Id of the control token written `text`, or None."""
        return self._control_ids_by_text.get(text)

    def _check(self) -> None:
        """Fail at load, not in the middle of the first answer (case J17)."""
        path = self.model_dir / "tokenizer.json"
        missing = [t for t in self.control_texts.all() if t not in self._control_ids_by_text]
        if missing:
            raise CheckpointError(
                f"{path} lacks the control tokens {', '.join(missing)}, which a chat with this model family needs; "
                "is it the tokenizer that was shipped with the model?"
            )
        for text in self.control_texts.all():
            if self.encode(text, allow_control=True) != [self._control_ids_by_text[text]]:
                raise CheckpointError(f"{path} does not encode {text} as the token it reserves for it; it is damaged")
        try:
            back = self.decode(self.encode(_MARKER, allow_control=False), skip_special=False)
        except KeyError as err:
            raise CheckpointError(f"{path} has tokens that are not byte-level BPE (character {err})") from err
        if back != _MARKER:
            raise CheckpointError(f"{path} turns {_MARKER!r} into {back!r}; byte-level BPE returns it unchanged")

    def _find_end_ids(self, generation: dict[str, Any]) -> frozenset[int]:
        ids = set(_int_list(generation.get("eos_token_id"), "eos_token_id", self.model_dir))
        named = self.special_texts.get("eos_token", "")
        for end_text in (named, self.control_texts.turn_end, self.control_texts.end_of_text):
            found = self.id_of(end_text)
            if found is not None:
                ids.add(found)
        return frozenset(ids)


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """A JSON object from a checkpoint file; {} when it may be missing and is."""
    if missing_ok and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise CheckpointError(f"cannot read {path}: {err}") from err
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _build_pair(path: Path, spec: dict[str, Any]) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """The tokenizer as shipped, and its twin that knows no reserved token at all."""
    model = spec.get("model")
    stages = json.dumps([spec.get("pre_tokenizer"), spec.get("decoder")])
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or '"ByteLevel"' not in stages:
        raise CheckpointError(f"{path} is not a byte-level BPE tokenizer, the only kind this engine reads")
    added = {t["content"] for t in spec.get("added_tokens") or []}
    stripped = dict(model, vocab={text: i for text, i in model["vocab"].items() if text not in added})
    twin = dict(spec, model=stripped, added_tokens=[], post_processor=None)
    pair = []
    for version in (spec, twin):
        try:
            built = tokenizers.Tokenizer.from_str(json.dumps(version))
        except Exception as err:  # the library raises bare Exception for whatever it dislikes
            raise CheckpointError(f"{path} cannot be loaded: {err}") from err
        built.no_truncation()
        built.no_padding()
        pair.append(built)
    return pair[0], pair[1]


def _alternation(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Leftmost, longest first: the same choice the tokenizer's own matcher makes."""
    ordered = sorted((t for t in texts if t), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _split(text: str, pattern: re.Pattern[str] | None, ids: dict[str, int]) -> Iterable[tuple[str, int | None]]:
    start = 0
    for match in pattern.finditer(text) if pattern else ():
        if match.start() > start:
            yield text[start : match.start()], None
        yield match.group(), ids[match.group()]
        start = match.end()
    if start < len(text):
        yield text[start:], None


def _replace_lone_surrogates(text: str) -> str:
    """JSON can carry half a surrogate pair, UTF-8 cannot: write it as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _text_of(value: Any) -> str | None:
    """tokenizer_config writes a special token as text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _int_list(value: Any, name: str, model_dir: Path) -> list[int]:
    if value is None:
        return []
    items: Sequence[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in items):
        raise CheckpointError(f"{model_dir / 'generation_config.json'}: {name} must be a token id or a list of them")
    return list(items)


def _default_sampling(generation: dict[str, Any], path: Path) -> dict[str, float | int]:
    found = {key: generation[key] for key in _SAMPLING_KEYS if generation.get(key) is not None}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{path}: {key} must be a number, not {value!r}")
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def _byte_of_char() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE vocabularies (GPT-2's convention), inverted.

    Printable Latin-1 bytes stand for themselves; the others are numbered upwards from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
