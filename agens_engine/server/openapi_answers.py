"""What answers hold, as JSON schemas of the OpenAPI document; fields that are not listed may be there, too."""

from __future__ import annotations

from agens_engine.server.openapi_parts import (
    NAME,
    OBJECT,
    TEXT,
    TOKEN_IDS,
    Schema,
    record,
    several,
)

_COUNT: Schema = {"type": "integer", "minimum": 0}
_USAGE = record(
    ("prompt_tokens", "completion_tokens", "total_tokens"),
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
)
_FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
_SAID = record(("role", "content"), role={"const": "assistant"}, content=TEXT, reasoning_content={"type": "string"})
_MODEL = record(
    ("id", "object", "created", "owned_by", "context_length", "max_model_len", "input_modalities", "output_modalities"),
    id={"type": "string"},
    object={"const": "model"},
    created=_COUNT,
    context_length=_COUNT,
    max_model_len=_COUNT,
    input_modalities=several({"enum": ["text", "image"]}),
    output_modalities=several({"const": "text"}),
)


def _answer(kind: str, *required: str, **properties: Schema) -> Schema:
    names = ("id", "object", "model", "usage", *required)
    return record(names, id={"type": "string"}, object={"const": kind}, model={"type": "string"}, **properties)


ANSWERS: dict[str, Schema] = {
    "ChatCompletion": _answer(
        "chat.completion",
        "created",
        "choices",
        "timings",
        created=_COUNT,
        choices=several(
            record(
                ("index", "message", "finish_reason", "logprobs"), index=_COUNT, message=_SAID, finish_reason=_FINISH
            ),
            low=1,
        ),
        usage=_USAGE,
        timings={"type": "object"},
    ),
    "Completion": _answer(
        "text_completion",
        "created",
        "choices",
        created=_COUNT,
        choices=several(
            record(("index", "text", "finish_reason"), index=_COUNT, text={"type": "string"}, finish_reason=_FINISH),
            low=1,
        ),
        usage=_USAGE,
    ),
    "Response": _answer(
        "response",
        "status",
        "output",
        status={"enum": ["completed", "incomplete", "failed", "in_progress"]},
        output=several(record(("type", "id"), type={"enum": ["message", "reasoning", "function_call"]})),
        usage=OBJECT,
    ),
    "Message": record(
        ("id", "type", "role", "model", "content", "stop_reason", "usage"),
        type={"const": "message"},
        role={"const": "assistant"},
        content=several(record(("type",), type={"enum": ["text", "thinking", "tool_use"]})),
        stop_reason={"enum": ["end_turn", "max_tokens", "tool_use", "stop_sequence"]},
        usage={"type": "object"},
    ),
    "TokenCount": record(("input_tokens",), input_tokens=_COUNT),
    "Tokens": record(("count", "tokens", "max_model_len"), count=_COUNT, tokens=TOKEN_IDS, max_model_len=_COUNT),
    "Prompt": record(("prompt",), prompt={"type": "string"}),
    "Model": _MODEL,
    "ModelList": record(("object", "data"), object={"const": "list"}, data=several(_MODEL)),
    "Health": record(("status",), status={"enum": ["loading", "ok", "failed", "stopping"]}, reason={"type": "string"}),
    "Props": record(
        ("model", "context_length", "max_sequences", "max_output_tokens", "default_sampling", "memory"),
        context_length=_COUNT,
        max_sequences=_COUNT,
        max_output_tokens=_COUNT,
        default_sampling={"type": "object"},
        memory=OBJECT,
    ),
    "Slots": record(
        ("max_sequences", "running", "waiting", "slots"),
        slots=several(
            record(
                ("id", "state", "prompt_tokens", "generated_tokens", "max_tokens", "seconds"),
                state={"enum": ["waiting", "generating"]},
                prompt_tokens=_COUNT,
                generated_tokens=_COUNT,
                max_tokens=_COUNT,
                seconds={"type": "number", "minimum": 0},
            )
        ),
    ),
    "Document": record(("openapi", "info", "paths"), openapi={"type": "string"}),
    "Error": record(
        ("error",),
        error=record(
            ("message", "type", "param", "code"), message=NAME, type={"type": "string"}, param=TEXT, code=TEXT
        ),
    ),
    "AnthropicError": record(
        ("type", "error"),
        type={"const": "error"},
        error=record(("type", "message"), type={"type": "string"}, message=NAME),
    ),
}
