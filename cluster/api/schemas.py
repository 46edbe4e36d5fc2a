"""What clients may send: OpenAI's requests plus the extras that vLLM's users know. Unknown fields are refused.

Every limit that can be checked without the model or the tokenizer is checked here, and named in the error.
`None` always means "not given".
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from blockferry.cluster.api.errors import ApiError, from_validation, unsupported

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
MAX_TOP_K = 1 << 30
MAX_SEED = (1 << 63) - 1
MAX_LOGIT_BIASES = 1024
MAX_ID_CHARS = 256

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class _Body(BaseModel):
    """Strict: no unknown fields, no NaN, no "1" for 1."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


BodyT = TypeVar("BodyT", bound=_Body)


class StreamOptions(_Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(_Body):
    """Parameters that completions and chat completions share."""

    # OpenAI's features that cannot be honoured here: the reason, and the values that ask for nothing.
    refused: ClassVar[dict[str, str]] = {}
    harmless: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_LOGIT_BIASES)
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31)
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_ID_CHARS)
    request_id: str | None = Field(None, min_length=1, max_length=MAX_ID_CHARS)
    user: str | None = None  # accepted and not used
    metadata: dict[str, str] | None = None  # accepted and not used

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, value: Any) -> Any:
        """Refuse features by name, drop fields that ask for nothing, and make one stop string a list."""
        if not isinstance(value, dict):
            return value
        kept = {}
        for name, field in value.items():
            if name in cls.refused:
                if field is not None and field not in cls.harmless.get(name, ()):
                    raise unsupported(name, cls.refused[name])
                continue
            kept[name] = [field] if name == "stop" and isinstance(field, str) else field
        return kept

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream=true; set it or remove stream_options", param="stream_options")
        limit = self.token_limit
        if self.min_tokens is not None and limit is not None and self.min_tokens > limit:
            raise ApiError(f"min_tokens={self.min_tokens} is more than max_tokens={limit}", param="min_tokens")
        return self

    @property
    def token_limit(self) -> int | None:
        """The number of tokens asked for at most."""
        return self.max_tokens


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    refused: ClassVar[dict[str, str]] = {
        "suffix": "the model continues a prompt, it does not fill a gap",
        "response_format": "guided decoding is not built in; ask for the format in the prompt",
        "prompt_embeds": "send text or token ids",
    }
    harmless: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",), "response_format": ({"type": "text"},)}

    prompt: Any = Field(...)  # str, list[str], list[int], list[list[int]]; prompts.py takes it apart
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported(
                "best_of", f"best_of={self.best_of} must equal n={self.n or 1}; rank the n choices yourself"
            )
        return self


class TextPart(_Body):
    """One part of a message's content; only text is understood."""

    type: str
    text: str


class ChatMessage(_Body):
    """One message; parts other than text and calls of tools are refused by name."""

    role: str = Field(min_length=1, max_length=MAX_ID_CHARS)
    content: str | list[TextPart]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for field in ("tool_calls", "function_call", "audio", "refusal"):
            if value.get(field):
                raise unsupported(f"messages.{field}", "messages hold text only")
        content = value.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise unsupported("messages.content", f"a part of type {kind!r}; this model reads text only")
        return {k: v for k, v in value.items() if k not in _IGNORED_IN_MESSAGES or v}

    @property
    def text(self) -> str:
        """The content as one text; parts follow each other on lines of their own."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


_IGNORED_IN_MESSAGES = ("tool_calls", "function_call", "audio", "refusal", "annotations")


class ChatRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    refused: ClassVar[dict[str, str]] = {
        "tools": "the server does not parse tool calls; describe the tools in the prompt",
        "tool_choice": "there are no tools",
        "parallel_tool_calls": "there are no tools",
        "functions": "the server does not parse function calls",
        "function_call": "there are no functions",
        "response_format": "guided decoding is not built in; ask for the format in the prompt",
        "audio": "the model makes text only",
        "modalities": "the model makes text only",
        "prediction": "predicted outputs are not built in",
        "reasoning_effort": "the model does not reason apart from its answer",
        "service_tier": "there is one tier",
        "store": "nothing is stored",
        "verbosity": "ask for it in the prompt",
        "web_search_options": "the server does not search",
    }
    harmless: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (False, True),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
        "service_tier": ("auto", "default"),
        "store": (False,),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(f"top_logprobs={self.top_logprobs} needs logprobs=true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                "continue_final_message=true needs add_generation_prompt=false: either the last message goes on, "
                "or a new one begins",
                param="continue_final_message",
            )
        return self

    @property
    def token_limit(self) -> int | None:
        """The newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(_Body):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError("send either prompt or messages", param="prompt")
        return self


class DetokenizeRequest(_Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def parse(kind: type[BodyT], data: bytes) -> BodyT:
    """Read a request's body. Raises ApiError that names parameter, value and limit."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise ApiError(
            f"the body is not UTF-8: byte 0x{byte:02x} at offset {error.start}", code="invalid_utf8"
        ) from error
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise from_validation(error) from error
