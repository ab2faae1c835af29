"""The protocol between the application of HTTP and rank 0: what a client asks for, in types, and what comes back.

Each call has a connection of its own: a pair of sockets, a Unix domain socket, or an `authenticated_stream`. The
application sends one line of JSON, a :class:`Call`. Rank 0 answers with lines of JSON, :class:`Event` each: the last
one is :class:`Result`, :class:`Failed`, or the :class:`Finished` of the last choice. To close the connection is to
cancel the call.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from .refusal import Refusal

__all__ = [
    "CALL",
    "EVENT",
    "MAX_LINE",
    "Admitted",
    "Call",
    "Detokenize",
    "Event",
    "Failed",
    "Finished",
    "Generate",
    "Grammar",
    "Output",
    "Progress",
    "Prompt",
    "Result",
    "Sampling",
    "Status",
    "TokenLogprob",
    "Tokenize",
    "ToolCall",
]

MAX_LINE = 64 << 20  # bytes of a call: a body of the client, whose characters JSON may escape with six each


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Sampling(_Message):
    """The sampling of an answer. None: the operator's default, or mlx-lm's.

    The names are those of mlx-lm's server, with its meanings.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 0.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logit_bias: dict[int, float] = {}


class Grammar(_Message):
    """A description of the text that an answer must be.

    Attributes:
        kind: "json": ``value`` is a JSON schema; "regex": a regular expression for the whole text; "choice": a list of
            texts, of which it is one; "lark": a grammar in llguidance's variant of Lark.
    """

    kind: Literal["json", "regex", "choice", "lark"]
    value: Any


class Prompt(_Message):
    """A prompt: ``text``, ``tokens``, or ``messages``, and nothing of the others.

    Attributes:
        messages: of a chat, as OpenAI's API has them, with the content of each as text or None.
        tools: as OpenAI's API has them.
        template_arguments: variables of the chat template, beyond the operator's.
        continue_final_message: whether the answer continues the last message, instead of beginning one.
        add_generation_prompt: whether the template begins the answer's message.
        role_mapping: mlx-lm's, for tokenizers without a chat template; None for its default.
        add_special_tokens: whether ``text`` gets the tokens that its tokenizer puts before and after a text.
    """

    text: str | None = None
    tokens: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    template_arguments: dict[str, Any] = {}
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    role_mapping: dict[str, str] | None = None
    add_special_tokens: bool = True


class Generate(_Message):
    """Answers to a prompt, which is made into tokens once.

    Attributes:
        n: the number of answers, the choices; they come side by side.
        model: the name of the model or of an adapter; None for the model.
        adapter: the name of an adapter, mlx-lm's field `adapters`; None for that of ``model``.
        tool_choice: "none", "auto", "required", or the name of a function in ``prompt.tools`` that must be called.
        parallel_tool_calls: whether an answer may have several calls.
        max_tokens: None for the operator's default. 0: the answer ends with the prompt.
        min_tokens: the number of tokens before which nothing ends the answer.
        ignore_eos: whether the tokens that end an answer are tokens like others.
        stop: stop words.
        stop_token_ids: tokens that end the answer.
        include_stop: whether the stop word, or the token of ``stop_token_ids``, is a part of the answer.
        seed: of the first choice; it counts up, modulo 2**64. None: rank 0 draws one for each.
        top_logprobs: the number of likely tokens that come with each token; None: no logprobs.
        prompt_logprobs: as ``top_logprobs``, for the tokens of the prompt, which come before those of the answer.
        priority: vLLM's; the least is served first.
        wants_prompt: whether :class:`Admitted` has the text of the prompt.
    """

    op: Literal["generate"] = "generate"
    n: int = 1
    model: str | None = None
    adapter: str | None = None
    prompt: Prompt
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop: bool = False
    seed: int | None = None
    sampling: Sampling = Sampling()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    priority: int = 0
    wants_prompt: bool = False


class Tokenize(_Message):
    """The tokens of a prompt. The :class:`Result` is {"model", "tokens", "max_model_len"}."""

    op: Literal["tokenize"] = "tokenize"
    model: str | None = None
    prompt: Prompt


class Detokenize(_Message):
    """The text of tokens. The :class:`Result` is {"prompt": text}."""

    op: Literal["detokenize"] = "detokenize"
    model: str | None = None
    tokens: list[int]


class Status(_Message):
    """The state of rank 0, and the names that it serves.

    The :class:`Result` is {"reason": why no request is served, or "", "models": the names of the model, "adapters":
    those of adapters}, and with ``metrics`` also {"metrics": the text of rank 0's part of /metrics}. With ``cluster``
    it has {"cluster": {"model", "layout", "held": what each rank holds, "requests": their counts, "observation": the
    flight records of the ranks, or None}}, if requests are served.
    """

    op: Literal["status"] = "status"
    metrics: bool = False
    cluster: bool = False


class ToolCall(_Message):
    """A call of a tool. ``arguments``: JSON, as OpenAI's API has it in a string."""

    name: str
    arguments: str


class TokenLogprob(_Message):
    """A token of an answer or of its prompt.

    Attributes:
        text, bytes: what it stands for; the text has U+FFFD where it is none by itself.
        logprob: None for the first token of a prompt.
    """

    id: int
    text: str
    bytes: list[int]
    logprob: float | None
    top: list["TokenLogprob"] = []


class _OfChoice(_Message):
    """An event of one of the choices of a call."""

    choice: int = 0


class Admitted(_OfChoice):
    """The choice has a place in the batch; its first event."""

    event: Literal["admitted"] = "admitted"
    model: str
    prompt_tokens: int
    cached_tokens: int
    prompt_text: str | None = None


class Progress(_OfChoice):
    """The progress of a prompt: ``processed`` of its ``total`` tokens are computed."""

    event: Literal["progress"] = "progress"
    processed: int
    total: int


class Output(_OfChoice):
    """A part of an answer. Any of its fields may be empty.

    Attributes:
        content, reasoning: text.
        tool_calls: complete calls of tools.
        tokens: with logprobs, the tokens that are decided, each once; first those of the prompt, if they are wanted.
        completion_tokens: the number of tokens of the answer so far.
    """

    event: Literal["output"] = "output"
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    tokens: list[TokenLogprob] = []
    completion_tokens: int = 0


class Finished(_OfChoice):
    """The end of an answer. ``stop_reason``: the stop word or the stop token that ended it, as vLLM has it, or None."""

    event: Literal["finished"] = "finished"
    finish_reason: Literal["stop", "length", "tool_calls"]
    completion_tokens: int
    stop_reason: str | int | None = None


class Failed(_Message):
    """The end of a request that is not served, or not to its end."""

    event: Literal["failed"] = "failed"
    message: str
    status: int
    retry_after: int | None = None
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, refusal: Refusal) -> "Failed":
        return cls(
            message=str(refusal),
            status=refusal.status,
            retry_after=refusal.retry_after,
            param=refusal.param,
            code=refusal.code,
        )

    @property
    def refusal(self) -> Refusal:
        return Refusal(self.message, self.status, self.retry_after, self.param, self.code)


class Result(_Message):
    """The answer to all but :class:`Generate`."""

    event: Literal["result"] = "result"
    value: Any


Call = Annotated[Generate | Tokenize | Detokenize | Status, Field(discriminator="op")]
Event = Annotated[Admitted | Progress | Output | Finished | Failed | Result, Field(discriminator="event")]
CALL: TypeAdapter[Any] = TypeAdapter(Call)
EVENT: TypeAdapter[Any] = TypeAdapter(Event)
