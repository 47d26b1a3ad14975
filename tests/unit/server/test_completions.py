"""POST /v1/completions: every form of prompt, whole and streamed; nothing is split or parsed."""

from __future__ import annotations

from typing import Any

import pytest

from agens_engine.core import Request
from tests.fake_engine import Steps
from tests.serverkit import END, in_loop, post, running, says, stream
from tests.textkit import byte_tokens, load_kit

TOKENIZER = load_kit()[0]


def echo_script(request: Request) -> Steps:
    """Says how many prompt tokens it got."""
    return [byte_tokens(TOKENIZER, f"{len(request.prompt_ids)} tokens"), [TOKENIZER.id_of(END) or 0]]


def test_raw_text_stays_raw() -> None:
    async def go() -> None:
        async with running(says(f"a<|think|>b<|/think|>c 🦊{END}")) as (client, engine):
            status, body = await post(client, "/v1/completions", {"prompt": "<|think|>once", "model": "alias"})
            payloads, _ = await stream(client, "/v1/completions", {"prompt": "<|think|>once"})
        assert status == 200
        [choice] = body["choices"]
        assert choice.pop("limits")["max_tokens_from"] == "context"
        assert choice == {"index": 0, "text": "a<|think|>b<|/think|>c 🦊", "logprobs": None, "finish_reason": "stop"}
        assert body["object"] == "text_completion" and body["usage"]["total_tokens"] > 0
        assert "".join(p["choices"][0]["text"] for p in payloads) == choice["text"]
        assert payloads[-1]["choices"][0]["finish_reason"] == "stop" and "usage" not in payloads[-1]
        assert engine.requests[0].prompt_ids[0] == TOKENIZER.think_start_id

    in_loop(go)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], ["3 tokens"]),
        ([[5, 6], [7]], ["2 tokens", "1 tokens"]),
        (["<|call|>", "<|call|><|call|>"], ["1 tokens", "2 tokens"]),
    ],
)
def test_every_form_of_prompt(prompt: Any, expected: list[str]) -> None:
    async def go() -> None:
        async with running(echo_script) as (client, engine):
            body = {"prompt": prompt, "n": 2, "stream_options": {"include_usage": True}}
            _, whole = await post(client, "/v1/completions", body)
            payloads, _ = await stream(client, "/v1/completions", body)
        texts = [text for text in expected for _ in range(2)]
        assert [choice["text"] for choice in whole["choices"]] == texts
        streamed = [""] * len(texts)
        for payload in payloads[:-1]:
            streamed[payload["choices"][0]["index"]] += payload["choices"][0]["text"]
        assert streamed == texts
        assert payloads[-1]["choices"] == [] and payloads[-1]["usage"] == whole["usage"]
        assert whole["usage"]["prompt_tokens"] == sum(int(text.split()[0]) for text in expected)
        assert whole["usage"]["completion_tokens"] == len(texts) * (len("3 tokens") + 1)
        assert len({request.request_id for request in engine.requests}) == len(engine.requests)

    in_loop(go)


def test_logprobs_in_the_older_form() -> None:
    async def go() -> None:
        async with running(says(f"abc{END}", 2)) as (client, _):
            _, body = await post(client, "/v1/completions", {"prompt": "x", "logprobs": 2})
            payloads, _ = await stream(client, "/v1/completions", {"prompt": "x", "logprobs": 2})
        found = body["choices"][0]["logprobs"]
        assert found["tokens"][:3] == ["a", "b", "c"] and found["text_offset"][:4] == [0, 1, 2, 3]
        assert found["token_logprobs"] == [-0.25] * 4 and len(found["top_logprobs"][0]) == 2
        pieces = [p["choices"][0]["logprobs"] for p in payloads if p["choices"][0]["logprobs"]]
        assert [offset for piece in pieces for offset in piece["text_offset"]] == found["text_offset"]

    in_loop(go)


@pytest.mark.parametrize("stop", [["beta gamma"]])
def test_C4_C10_stop_over_several_tokens_of_one_step(stop: list[str]) -> None:
    async def go() -> None:
        async with running(says(f"alpha beta gamma delta{END}", 8)) as (client, _):
            _, body = await post(client, "/v1/completions", {"prompt": "x", "stop": stop})
        assert body["choices"][0]["text"] == "alpha "
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len("alpha beta gamma")

    in_loop(go)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [10**9]}, "prompt[0]"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "z"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async def go() -> None:
        async with running(says(END)) as (client, engine):
            status, body = await post(client, "/v1/completions", {"prompt": "x", **fields})
            assert status == 400 and body["error"]["param"] == param, body
            assert engine.requests == []

    in_loop(go)
