"""What request bodies may hold, as JSON schemas of the OpenAPI document.

Every constraint here is one that the server enforces. Limits that depend on other fields or on the checkpoint (tool
names, context, regular expressions) are left to the 400 that explains them.
"""

from __future__ import annotations

from agens_engine.server.chat_request import MAX_TOP_LOGPROBS
from agens_engine.server.openai_completions import MAX_LOGPROBS
from agens_engine.server.openapi_parts import (
    EXPRESSION,
    FLAG,
    NAME,
    NOT_TRUE,
    NULL,
    NUMBER,
    OBJECT,
    OFF,
    SCHEMA_OR_TEXT,
    TEXT,
    TOKEN_IDS,
    Schema,
    any_of,
    between,
    record,
    ref,
    several,
    whole,
)
from agens_engine.server.options import MAX_CHOICES
from agens_engine.text.stops import MAX_STOP_STRINGS

_STOP_LIST = several(NAME, high=MAX_STOP_STRINGS)
_CHOICES = several(NAME, low=1, high=4096)
_STRUCTURED = {
    "type": ["object", "null"],
    "minProperties": 1,
    "additionalProperties": False,
    "properties": {
        "json": SCHEMA_OR_TEXT,
        "regex": EXPRESSION,
        "choice": any_of(NULL, _CHOICES),
        "grammar": EXPRESSION,
        "json_object": FLAG,
        "structural_tag": NOT_TRUE,
        "whitespace_pattern": NOT_TRUE,
        "disable_additional_properties": NOT_TRUE,
        "disable_any_whitespace": NOT_TRUE,
    },
}
# Sampling and extensions: the same names and meaning in every dialect.
_SAMPLING: dict[str, Schema] = {
    "model": TEXT,
    "stream": FLAG,
    "max_tokens": whole(1),
    "temperature": between(0, 100),
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": whole(-1),
    "min_p": between(0, 1),
    "presence_penalty": between(-2, 2),
    "frequency_penalty": between(-2, 2),
    "repetition_penalty": {"type": ["number", "null"], "minimum": 0.01, "maximum": 10},
    "seed": whole(-(2**63), 2**63 - 1),
    "logit_bias": {
        "type": ["object", "null"],
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "stop_token_ids": any_of(NULL, TOKEN_IDS),
    "ignore_eos": FLAG,
    "speculation": FLAG,
    "draft_sources": any_of(NULL, several({"type": "string"})),
    "cache_prompt": FLAG,
    "repetition_guard": FLAG,
    "reasoning_budget_soft_bias": NUMBER,
    "structured_outputs": _STRUCTURED,
    "guided_json": SCHEMA_OR_TEXT,
    "guided_regex": EXPRESSION,
    "guided_choice": any_of(NULL, _CHOICES),
    "guided_grammar": EXPRESSION,
    "json_schema": SCHEMA_OR_TEXT,
    "grammar": EXPRESSION,
    "prompt_logprobs": OFF,
    "functions": OFF,
    "function_call": OFF,
    "bad_words": OFF,
    "min_tokens": any_of(OFF, {"type": "integer", "maximum": 0}),
}
_THINKING = {
    "enable_thinking": FLAG,
    "chat_template_kwargs": {
        "type": ["object", "null"],
        "properties": {"reasoning_effort": TEXT, "enable_thinking": FLAG},
    },
}
_STOP = {"stop": any_of(NULL, NAME, _STOP_LIST)}
_PARALLEL = {"parallel_tool_calls": FLAG}

_TEXT_PART = record(("text",), type={"enum": ["text", "input_text", "output_text"]}, text={"type": "string"})
_REFUSAL_PART = record(("type", "refusal"), type={"const": "refusal"}, refusal={"type": "string"})
_CONTENT = any_of({"type": ["string", "null"]}, several(any_of({"type": "string"}, _TEXT_PART, _REFUSAL_PART)))
_TOOL_CALL = record(
    ("function",),
    id=TEXT,
    function=record(("name",), name=NAME, arguments={"type": ["string", "object", "null"]}),
)
_MESSAGE = any_of(
    record(
        ("role",),
        role={"enum": ["system", "developer", "user", "tool"]},
        content=_CONTENT,
        name=TEXT,
        tool_call_id=TEXT,
    ),
    record(
        ("role",),
        role={"const": "assistant"},
        content=_CONTENT,
        name=TEXT,
        tool_call_id=TEXT,
        tool_calls=any_of(NULL, several(_TOOL_CALL)),
    ),
)
_SKIPPED_TOOL = record(("type",), type={"type": "string", "minLength": 1, "not": {"enum": ["function", "namespace"]}})
_FUNCTION = {"name": NAME, "description": TEXT, "parameters": OBJECT}
_FLAT_TOOL = record(("name",), type={"enum": ["function", None]}, function=NULL, **_FUNCTION)
_NESTED_TOOL = record(("function",), type={"enum": ["function", None]}, function=record(("name",), **_FUNCTION))
_NAMESPACE = record(("type",), type={"const": "namespace"}, tools=any_of(NULL, several(ref("Tool"))))
_TOOL_CHOICE_WORD: Schema = {"enum": ["auto", "none", "required", None]}

_FORMAT_FREE = record(("type",), type={"const": "text"})
_FORMAT_JSON = record(("type",), type={"const": "json_object"}, schema=OBJECT)
_FORMAT_FLAT = record(
    ("type", "schema"), type={"const": "json_schema"}, schema={"type": "object"}, strict=FLAG, json_schema=NULL
)
_FORMAT_NESTED = record(
    ("type", "json_schema"),
    type={"const": "json_schema"},
    json_schema=record(("schema",), schema={"type": "object"}, strict=FLAG),
)
_RESPONSE_FORMAT = any_of(NULL, _FORMAT_FREE, _FORMAT_JSON, _FORMAT_FLAT, _FORMAT_NESTED)

_ITEM_PARTS = any_of(TEXT, several(any_of(record(
    ("type", "text"),
    type={"enum": ["input_text", "output_text", "text", "summary_text", "reasoning_text"]},
    text={"type": "string"},
), record(("type",), type={"const": "refusal"}, refusal=TEXT))))  # fmt: skip
_MESSAGE_TYPE: Schema = {"enum": ["message", None]}
_INPUT_ITEM = any_of(
    record(("role",), type=_MESSAGE_TYPE, role={"enum": ["user", "tool"]}, content=_CONTENT),
    record(("role",), type=_MESSAGE_TYPE, role={"enum": ["system", "developer", "assistant"]}, content=_ITEM_PARTS),
    record(("type",), type={"const": "reasoning"}, content=_ITEM_PARTS, summary=_ITEM_PARTS, encrypted_content=TEXT),
    record(
        ("type", "call_id", "name"),
        type={"const": "function_call"},
        call_id=NAME,
        name=NAME,
        arguments={"type": ["string", "object", "null"]},
    ),
    record(("type", "call_id"), type={"const": "function_call_output"}, call_id=NAME, output=_ITEM_PARTS),
    record(("type",), type={"type": "string", "pattern": "^(web_search|local_shell|file_search|computer)_call$"}),
)

_TEXT_BLOCK = record(("type", "text"), type={"const": "text"}, text={"type": "string"})
_RESULT_BLOCK = record(
    ("type", "tool_use_id"),
    type={"const": "tool_result"},
    tool_use_id=NAME,
    content=any_of(TEXT, several(_TEXT_BLOCK)),
)
_ASSISTANT_BLOCK = any_of(
    _TEXT_BLOCK,
    record(("type", "thinking"), type={"const": "thinking"}, thinking={"type": "string"}),
    record(("type",), type={"const": "redacted_thinking"}),
    record(("type", "id", "name"), type={"const": "tool_use"}, id=NAME, name=NAME, input=OBJECT),
)


def _turn(role: str, block: Schema) -> Schema:
    return record(("role", "content"), role={"const": role}, content=any_of({"type": "string"}, several(block)))


_MESSAGES_TOOL = any_of(
    record(("name",), type={"enum": ["custom", None]}, name=NAME, description=TEXT, input_schema=OBJECT),
    record(("type",), type={"type": "string", "not": {"enum": ["custom"]}}),
)

REQUESTS: dict[str, Schema] = {
    "ChatRequest": record(
        ("messages",),
        **_SAMPLING,
        **_THINKING,
        **_STOP,
        **_PARALLEL,
        messages=several(_MESSAGE, low=1),
        n=whole(1, MAX_CHOICES),
        max_completion_tokens=whole(1),
        logprobs=FLAG,
        top_logprobs=whole(0, MAX_TOP_LOGPROBS),
        stream_options={"type": ["object", "null"], "properties": {"include_usage": FLAG}},
        response_format=_RESPONSE_FORMAT,
        tools=any_of(NULL, several(ref("Tool"))),
        tool_choice=any_of(
            _TOOL_CHOICE_WORD,
            record(("type",), type={"const": "function"}, function=any_of(NULL, record(("name",), name=NAME))),
        ),
        reasoning_effort=TEXT,
        reasoning_budget={"description": "tokens; what is no whole number above 0 counts as not given"},
        add_generation_prompt=FLAG,
        continue_final_message=FLAG,
    ),
    "Tool": any_of(_NESTED_TOOL, _FLAT_TOOL, _NAMESPACE, _SKIPPED_TOOL),
    "CompletionRequest": record(
        ("prompt",),
        **_SAMPLING,
        **_STOP,
        prompt=any_of(
            {"type": "string"},
            {**TOKEN_IDS, "minItems": 1},
            several(any_of({"type": "string"}, {**TOKEN_IDS, "minItems": 1}), low=1),
        ),
        n=whole(1, MAX_CHOICES),
        best_of=whole(1),
        max_completion_tokens=whole(1),
        logprobs=whole(0, MAX_LOGPROBS),
        stream_options={"type": ["object", "null"], "properties": {"include_usage": FLAG}},
        response_format=_RESPONSE_FORMAT,
        echo=NOT_TRUE,
        suffix={"type": ["string", "null"], "maxLength": 0},
    ),
    "ResponsesRequest": record(
        ("input",),
        **_SAMPLING,
        **_THINKING,
        **_STOP,
        **_PARALLEL,
        input=any_of({"type": "string"}, several(_INPUT_ITEM, low=1)),
        instructions=TEXT,
        max_output_tokens=whole(1),
        tools=any_of(NULL, several(ref("Tool"))),
        tool_choice=any_of(_TOOL_CHOICE_WORD, record(("type", "name"), type={"const": "function"}, name=NAME)),
        text={
            "type": ["object", "null"],
            "properties": {
                "format": any_of(
                    NULL,
                    _FORMAT_FREE,
                    record(("type",), type={"const": "json_object"}),
                    record(("type", "schema"), type={"const": "json_schema"}, schema={"type": "object"}, strict=FLAG),
                )
            },
        },
        reasoning={"type": ["object", "null"], "properties": {"effort": TEXT}},
        include=any_of(NULL, several({})),
        metadata=OBJECT,
        store=NOT_TRUE,
        background=NOT_TRUE,
        previous_response_id=NULL,
        conversation=NULL,
        prompt=NULL,
        top_logprobs={"enum": [None, 0]},
    ),
    "MessagesRequest": record(
        ("messages",),
        **_SAMPLING,
        **_THINKING,
        **_PARALLEL,
        messages=several(
            any_of(
                _turn("user", any_of(_TEXT_BLOCK, _RESULT_BLOCK)),
                _turn("assistant", _ASSISTANT_BLOCK),
                _turn("system", _TEXT_BLOCK),
            ),
            low=1,
        ),
        system=any_of(TEXT, several(_TEXT_BLOCK)),
        stop_sequences=any_of(NULL, _STOP_LIST),
        tools=any_of(NULL, several(_MESSAGES_TOOL)),
        tool_choice=any_of(
            NULL,
            record(("type",), type={"enum": ["auto", "any", "none"]}, disable_parallel_tool_use=FLAG),
            record(("type", "name"), type={"const": "tool"}, name=NAME, disable_parallel_tool_use=FLAG),
        ),
        thinking=any_of(
            NULL,
            record(("type",), type={"enum": ["enabled", "adaptive"]}, budget_tokens=whole(1)),
            record(("type",), type={"const": "disabled"}),
        ),
        output_config={
            "type": ["object", "null"],
            "properties": {
                "effort": TEXT,
                "format": any_of(
                    NULL,
                    _FORMAT_FREE,
                    record(("type",), type={"const": "json_object"}),
                    record(("type", "schema"), type={"const": "json_schema"}, schema={"type": "object"}),
                ),
            },
        },
    ),
    "TokenizeRequest": any_of(
        record(("prompt",), model=TEXT, prompt={"type": "string"}, messages=NULL, add_special_tokens=FLAG),
        ref("ChatRequest"),
    ),
    "DetokenizeRequest": record(("tokens",), model=TEXT, tokens=TOKEN_IDS),
}
