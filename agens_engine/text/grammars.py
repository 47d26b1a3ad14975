"""What an answer must look like, compiled for this checkpoint's tokenizer (llguidance; implements core.Grammar).

    AnswerFormat  response_format and its kin    ┐
    CallPlan      tools and tool_choice          ┴─►  one grammar: a call or an answer (case D1)  ─►  CompiledGrammar

Control tokens are special tokens of the grammar: no text of an answer can spell one. Compiled grammars are kept, since
agents send the same tools every turn.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from agens_engine.errors import RequestError
from agens_engine.text.call_grammar import WHITESPACE, CallPlan, call_rules, literal
from agens_engine.text.schema_refs import alone, sub_schemas
from agens_engine.text.tokenizer import Tokenizer

_KEPT = 64
_MAX_DEPTH = 64  # of a schema; the search for a fault goes no deeper


@dataclass(frozen=True)
class AnswerFormat:
    """A form for the answer's text.

    kind    "json"     value is a JSON schema
            "regex"    value is a regular expression for the whole text
            "choice"   value is a list of strings, one of which is the text
            "grammar"  value is a grammar in Lark's or in GBNF's notation
    param   the field it came from, for errors
    strict  a schema keyword that cannot be enforced is an error; else it is ignored
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    value: Any
    param: str
    strict: bool = True


class CompiledGrammar:
    """See core.Grammar."""

    def __init__(self, pristine: LLMatcher, end_token_ids: frozenset[int]) -> None:
        self._pristine = pristine
        self._end_token_ids = end_token_ids

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self._end_token_ids

    def matcher(self) -> LLMatcher:
        return self._pristine.deep_copy()


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, answer: AnswerFormat | None, calls: CallPlan | None) -> CompiledGrammar | None:
        """The grammar of an answer in this form, of these calls, or of either; None where nothing is asked for.

        Takes up to a second for large schemas (and the first time, for the tokenizer).
        raises   RequestError naming the field, and within a schema the path
        """
        if answer is None and calls is None:
            return None
        text = self._grammar_text(answer, calls)
        with self._lock:
            found = self._kept.get(text)
            if found is not None:
                self._kept.move_to_end(text)
                return found
            matcher = LLMatcher(self._binding, text, log_level=0)
            if matcher.is_error():
                raise self._refusal(matcher.get_error(), answer, calls)
            self._kept[text] = found = CompiledGrammar(matcher, self._tokenizer.end_token_ids)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return found

    @cached_property
    def _binding(self) -> LLTokenizer:
        vocabulary = _Vocabulary(self._tokenizer)
        ends = sorted(self._tokenizer.end_token_ids)
        return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=self._tokenizer.vocab_size, eos_token=ends)

    def _grammar_text(self, answer: AnswerFormat | None, calls: CallPlan | None) -> str:
        sub = None if answer is None else _answer_grammar(answer)
        if calls is None:
            return json.dumps({"grammars": [sub]})
        tokenizer = self._tokenizer
        rules = call_rules(calls, tokenizer.call_start_id, tokenizer.call_end_id)
        if calls.required:
            start = "start: GAP? calls"
        elif sub is not None:
            start = "start: GAP? calls | @answer"
        elif calls.parallel:
            start = "start: ANY (call ANY)*\nANY: /(?s:.*)/"
        else:
            start = "start: ANY? call?\nANY: /(?s:.+)/"
        grammars = [{"name": "top", "lark_grammar": f"{start}\n{rules}"}]
        if sub is not None and not calls.required:
            grammars.append({**sub, "name": "answer"})
        return json.dumps({"grammars": grammars})

    def _refusal(self, error: str, answer: AnswerFormat | None, calls: CallPlan | None) -> RequestError:
        """The error of a grammar that does not compile, with the place where it goes wrong."""
        schemas = [answer] if answer is not None else []
        for tool in calls.tools if calls is not None else ():
            function = tool["function"]
            place = f"tools.{function['name']}.parameters"
            strict = function.get("strict") is True
            schemas.append(AnswerFormat("json", function.get("parameters") or {}, place, strict))
        for schema in schemas:
            found = self._error({"grammars": [_answer_grammar(schema)]})
            if found:
                path = schema.param
                if schema.kind == "json":
                    path, found = self._find_fault(schema.value, schema, path)
                return RequestError(f"{path}: {_brief(found)}", param=path)
        param = "tools" if answer is None else answer.param
        return RequestError(f"{param}: no grammar can be made of this: {_brief(error)}", param=param)

    def _find_fault(self, schema: Mapping[str, Any], answer: AnswerFormat, path: str) -> tuple[str, str]:
        """The innermost sub-schema that fails by itself: its path and what is wrong with it."""
        root = answer.value
        for _ in range(_MAX_DEPTH):
            for name, sub in sub_schemas(schema):
                if self._error({"grammars": [_schema_grammar(alone(sub, root), answer.strict)]}):
                    schema, path = sub, f"{path}.{name}"
                    break
            else:
                break
        return path, self._error({"grammars": [_schema_grammar(alone(schema, root), answer.strict)]})

    def _error(self, grammar: Mapping[str, Any]) -> str:
        """What is wrong with a grammar; empty when nothing is."""
        failed, messages = LLMatcher.validate_grammar_with_warnings(json.dumps(grammar), self._binding)
        return messages[0] if failed else ""


class _Vocabulary:
    """The tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.end_token_ids)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, allow_control=False)


def _answer_grammar(answer: AnswerFormat) -> dict[str, Any]:
    """One grammar of llguidance's list; raises RequestError for what is wrong before compiling."""
    if answer.kind == "json":
        if _depth_above(answer.value, _MAX_DEPTH):
            raise RequestError(
                f"{answer.param} is nested more than {_MAX_DEPTH} levels deep; flatten the schema", param=answer.param
            )
        return _schema_grammar(answer.value, answer.strict)
    if answer.kind == "regex":
        return {"lark_grammar": f"start: /{regex_to_lark(answer.value)}/"}
    if answer.kind == "choice":
        return {"lark_grammar": "start: " + " | ".join(map(literal, answer.value))}
    try:
        return {"lark_grammar": any_to_lark(answer.value)}
    except Exception as error:  # the converter raises what it likes
        raise RequestError(f"{answer.param}: {_brief(str(error))}", param=answer.param) from None


def _schema_grammar(schema: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": not strict}}}


def _depth_above(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, Mapping) else item if isinstance(item, list) else ())
        ]
        if not level:
            return False
    return True


def _brief(error: str) -> str:
    """The first lines of a parser's message; it may quote the whole grammar."""
    return " ".join(line.strip() for line in error.splitlines()[:4])[:300]
