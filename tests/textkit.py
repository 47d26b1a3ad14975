"""A small byte-level BPE tokenizer and a chat template of the family, for tests of text handling.

The tokenizer is trained on the spot (milliseconds) on a few sentences; its control tokens follow the vocabulary, and
as in the family's real files only some of them carry the `special` flag.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from agens_engine.text.template import ChatTemplate
from agens_engine.text.tokenizer import AGENS_CONTROLS, Tokenizer

EXTRA_CONTROLS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_UNFLAGGED = ("<|think|>", "<|/think|>", "<|call|>", "<|/call|>", "<|result|>", "<|/result|>")
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. The answer is 42, and the reason is simple.",
    "<function=read_pdf>\n<parameter=page>\n1\n</parameter>\n</function>\n",
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=unit>\ncelsius\n</parameter>\n</function>\n",
    "beta gamma delta think call result user assistant system own fox ABC DEF GHI",
    '{"type": "object", "properties": {"city": {"type": "string"}}}',
    "Grüße aus Köln, 東京 and 🦊🦊",
]

TEMPLATE = """
{%- if messages[0].role == 'system' %}
    {{- '<|agens_start|>system\\n' + messages[0].content }}
{%- else %}
    {{- '<|agens_start|>system\\nYou are Agens by Blockway.' }}
{%- endif %}
{%- if reasoning_effort is defined and reasoning_effort not in ['low', 'medium', 'xhigh'] %}
    {{- raise_exception('unsupported reasoning_effort ' + reasoning_effort) }}
{%- endif %}
{%- if tools %}
    {{- '\\n<tools>\\n' }}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}{{ '</tools>' }}
{%- endif %}
{{- '<|agens_end|>\\n' }}
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('a system message must come first') }}{% endif %}
    {%- if m.role == 'user' %}
        {{- '<|agens_start|>user\\n' }}
        {%- if m.content is string %}{{ m.content }}{% else %}
            {%- for p in m.content %}
                {{- p.text if p.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|agens_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|agens_start|>assistant\\n<|think|>' + (m.reasoning_content or '') + '<|/think|>' + m.content }}
        {%- for c in m.tool_calls or [] %}
            {{- '<|call|>\\n<function=' + c.function.name + '>\\n' }}
            {%- for k, v in c.function.arguments | items %}
                {{- '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n<|/call|>' }}
        {%- endfor %}
        {{- '<|agens_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<|agens_start|>user\\n' }}{% endif %}
        {{- '<|result|>' + m.content + '<|/result|>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|agens_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|agens_start|>assistant\\n<|think|>' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<|/think|>' }}{% endif %}
{%- endif %}
"""


def tokenizer_json() -> dict[str, Any]:
    """The test tokenizer as the content of a tokenizer.json."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    built.train_from_iterator(_CORPUS * 2, trainer)
    for text in (*AGENS_CONTROLS.all(), *EXTRA_CONTROLS):
        token = tokenizers.AddedToken(text, normalized=False)
        if text in _UNFLAGGED:
            built.add_tokens([token])
        else:
            built.add_special_tokens([token])
    spec = json.loads(built.to_str())
    assert isinstance(spec, dict)
    return spec


def write_model_dir(folder: Path, spec: dict[str, Any] | None = None) -> Path:
    """Write the text files of a checkpoint into `folder`."""
    spec = spec or tokenizer_json()
    ids = {t["content"]: t["id"] for t in spec["added_tokens"]}
    generation: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95}
    generation["eos_token_id"] = [ids["<|agens_end|>"]]
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|agens_end|>"}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@cache
def load_kit() -> tuple[Tokenizer, ChatTemplate]:
    """Tokenizer and template, made once per process."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_dir(Path(name))
        tokenizer = Tokenizer.load(folder)
        return tokenizer, ChatTemplate.load(folder, tokenizer)


def native(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, allow_control=True)


def byte_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """`text` as one token per byte: the finest cut there is; no control token can come out."""
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [by_bytes[bytes([b])] for b in text.encode()]


def mixed_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Control texts as control ids, all the rest byte by byte."""
    ids: list[int] = []
    for piece, control_id in tokenizer.split_control(text):
        ids.extend(byte_tokens(tokenizer, piece) if control_id is None else [control_id])
    return ids


def cut(text: str, sizes: Sequence[int]) -> Iterable[str]:
    """`text` in pieces of the given sizes, repeated as needed."""
    start, i = 0, 0
    while start < len(text):
        size = sizes[i % len(sizes)] if sizes else len(text)
        yield text[start : start + size]
        start, i = start + size, i + 1
