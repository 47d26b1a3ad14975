"""Every error a user can cause, as one tree.

AgensError                    exit 1
├── UsageError                exit 2: a flag, an environment variable or a profile key is wrong
├── CheckpointError           a model folder that cannot be loaded: names the file and the tensor
│   └── ConfigError           config.json is missing a value or contradicts the tensors
├── PlanError                 the memory plan does not fit: names the line and the setting to change
├── OutOfPages                no page of sequence memory is left; the scheduler frees some or waits (HTTP 503)
├── EngineStoppedError        the engine is shutting down or has failed (HTTP 503)
└── RequestError              what a client sent is wrong (HTTP 400); `param` names the field
    ├── ContextLengthError    the prompt (plus its output) does not fit the context
    ├── TemplateError         the checkpoint's chat template refused the conversation
    └── NotFoundError         an unknown model or route (HTTP 404)

Each message says what was asked, what the limit is, and the way out. `assert` is for our own mistakes.
"""

from __future__ import annotations


class AgensError(Exception):
    """Base of all errors caused by input; `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(AgensError):
    exit_code = 2


class CheckpointError(AgensError):
    pass


class ConfigError(CheckpointError):
    pass


class PlanError(AgensError):
    pass


class OutOfPages(AgensError):
    """Sequence memory is used up; whoever schedules waits, preempts or drops stored sessions."""

    http_status = 503

    def __init__(self, asked: int, free: int, total: int, page_tokens: int) -> None:
        super().__init__(
            f"{asked} pages of {page_tokens} tokens were asked for and {free} of {total} are free; wait for a request "
            "to finish, or plan for a longer context or more sequences"
        )
        self.missing_pages = asked - free


class EngineStoppedError(AgensError):
    http_status = 503


class RequestError(AgensError):
    """A request that cannot be served as sent.

    param   the field at fault, in the API's own words (`messages[1].content`), or None
    code    a short machine-readable reason (`context_length_exceeded`), or None
    """

    http_status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    def __init__(self, prompt_tokens: int, context_tokens: int, *, param: str = "messages") -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and the context holds {context_tokens}, one of which must be left "
            f"for the answer; shorten the prompt by at least {prompt_tokens - context_tokens + 1} tokens",
            param=param,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class TemplateError(RequestError):
    pass


class NotFoundError(RequestError):
    http_status = 404
