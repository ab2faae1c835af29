"""The fields that chats and completions share, and those of other servers that change nothing here."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator

from ..protocol import Generate, Grammar, Prompt, Sampling
from ..refusal import Refusal
from . import structured
from .answers import ApiAnswer
from .fields import Checked, Fields, Integer, Number, Only, Unused, tokens_of

__all__ = [
    "MAX_ALL_CHOICES", "MAX_BIASES", "MAX_CHOICES", "MAX_STOP_TOKENS", "MAX_TOPS",
    "Generation", "MaxTokens", "StopWords", "Temperature", "TopK", "TopP", "object_of",
]  # fmt: skip

MAX_BIASES = 300  # entries of logit_bias, as in OpenAI's API
MAX_CHOICES = 16  # for a prompt
MAX_TOPS = 20
_MAX_PRIORITY = 100  # as vLLM has them: the least is served first
_MAX_STOPS = 16
_MAX_STOP = 256  # characters of a stop word
MAX_STOP_TOKENS = 64  # those of decisions.py, which is for the ranks
MAX_ALL_CHOICES = 64  # of all prompts of a request, each of which takes a place in the queue
_GRAMMARS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
)


def _stop(value: Any) -> list[str]:
    words = ([value] if value else []) if isinstance(value, str) else value
    if not (
        isinstance(words, list)
        and len(words) <= _MAX_STOPS
        and all(isinstance(word, str) and 0 < len(word) <= _MAX_STOP for word in words)
    ):
        raise ValueError(f"must be a string or up to {_MAX_STOPS} of them, of 1 to {_MAX_STOP} characters")
    return words


def _logit_bias(value: Any) -> dict[int, float]:
    problem = "must be an object of tokens, which are integers, with numbers from -100 to 100"
    if not isinstance(value, dict):
        raise ValueError(problem)
    if len(value) > MAX_BIASES:
        raise ValueError(f"must have at most {MAX_BIASES} entries")
    made = {}
    for token, bias in value.items():
        is_token = token.isascii() and token.isdigit() and len(token) <= 10 and int(token) < 1 << 31
        if not is_token or type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"{problem}; {token[:20]!r} is wrong")
        made[int(token)] = float(bias)
    return made


def _stop_token_ids(value: Any) -> list[int]:
    tokens = [] if value == [] else tokens_of(value)
    if len(tokens) > MAX_STOP_TOKENS:
        raise ValueError(f"must have at most {MAX_STOP_TOKENS} tokens")
    return tokens


def object_of(value: Any) -> dict[str, Any]:
    """An object. Raises ValueError: it is none."""
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return value


# Types of fields that all APIs have.
MaxTokens = Annotated[int | None, Integer(1, (1 << 31) - 1, off={-1: None})]
StopWords = Annotated[list[str], Checked(_stop, f"a string, or up to {_MAX_STOPS}, of up to {_MAX_STOP} characters")]
Temperature = Annotated[float | None, Number(0, 100, least=1e-4)]
TopP = Annotated[float | None, Number(0, 1)]
TopK = Annotated[int | None, Integer(0, (1 << 31) - 1, off={-1: 0})]


class StreamOptions(Fields):
    """OpenAI's options of a stream."""

    include_usage: bool = False
    include_obfuscation: Annotated[Any, Only((False,))] = None
    continuous_usage_stats: bool = False  # vLLM's


class Generation(Fields):
    """A request for an answer. Of the names that are OpenAI's, vLLM's, llama.cpp's and mlx-lm's."""

    model: str | None = Field(None, description="the name of the model, or of an adapter")
    adapters: str | None = Field(None, description="mlx-lm's: the name of an adapter")
    stream: bool = Field(False, description="the answer comes in events")
    stream_options: StreamOptions = Field(
        StreamOptions(), description="`include_usage`; with it, vLLM's `continuous_usage_stats`"
    )
    n: Annotated[int, Integer(1, MAX_CHOICES)] = Field(1, description="answers to each prompt; a seed counts up")
    max_tokens: MaxTokens = Field(None, description="of the answer, by default the operator's")
    max_completion_tokens: MaxTokens = Field(None, description="goes before `max_tokens`")
    n_predict: MaxTokens = Field(None, description="llama.cpp's name of `max_tokens`")
    min_tokens: Annotated[int, Integer(0, (1 << 31) - 1, off={-1: 0})] = Field(
        0, description="vLLM's: before that nothing ends the answer"
    )
    ignore_eos: bool = Field(False, description="vLLM's: tokens that end an answer do not")
    stop: StopWords = []
    stop_token_ids: Annotated[list[int], Checked(_stop_token_ids, f"a list of up to {MAX_STOP_TOKENS} tokens")] = []
    include_stop_str_in_output: bool = Field(
        False, description="vLLM's: the stop word or token is a part of the answer"
    )
    seed: Annotated[int | None, Integer(-(1 << 63), (1 << 64) - 1, off={-1: None})] = Field(
        None, description="by default another one each time"
    )
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    min_p: Annotated[float | None, Number(0, 1)] = None
    xtc_probability: Annotated[float | None, Number(0, 1)] = None
    xtc_threshold: Annotated[float | None, Number(0, 0.5)] = None
    repetition_penalty: Annotated[float | None, Number(0, 100, least=0.01, off={1: 0.0})] = None
    repetition_context_size: Annotated[int | None, Integer(0, 1 << 20)] = None
    presence_penalty: Annotated[float | None, Number(-100, 100)] = None
    presence_context_size: Annotated[int | None, Integer(0, 1 << 20)] = None
    frequency_penalty: Annotated[float | None, Number(-100, 100)] = None
    frequency_context_size: Annotated[int | None, Integer(0, 1 << 20)] = None
    logit_bias: Annotated[dict[int, float] | None, Checked(_logit_bias, f"up to {MAX_BIASES}, of -100 to 100")] = None
    top_logprobs: Annotated[int | None, Integer(0, MAX_TOPS, off={-1: None})] = Field(
        None, description="implies `logprobs`"
    )
    priority: Annotated[int, Integer(-_MAX_PRIORITY, _MAX_PRIORITY)] = Field(
        0, description="vLLM's: the least is first"
    )
    response_format: Annotated[
        Grammar | None, Checked(structured.response_format, "`text`, `json_object` or `json_schema`")
    ] = None
    structured_outputs: Annotated[
        Grammar | None, Checked(structured.structured_outputs, "vLLM's: `json`, `regex`, `choice` or `grammar` (Lark)")
    ] = None
    guided_json: Annotated[Grammar | None, Checked(structured.json_schema, "vLLM's: a JSON schema")] = None
    guided_regex: Annotated[Grammar | None, Checked(structured.regex, "vLLM's: a regular expression")] = None
    guided_choice: Annotated[Grammar | None, Checked(structured.choice, "vLLM's: a list of strings")] = None
    guided_grammar: Annotated[Grammar | None, Checked(structured.lark, "vLLM's: Lark as llguidance has it")] = None
    json_schema: Annotated[Grammar | None, Checked(structured.json_schema, "llama.cpp's: a JSON schema")] = None

    # They change no answer: who asks, what is kept where, how fast it comes.
    user: Annotated[Any, Unused()] = None
    metadata: Annotated[Any, Unused()] = None
    safety_identifier: Annotated[Any, Unused()] = None
    prompt_cache_key: Annotated[Any, Unused()] = None
    prompt_cache_options: Annotated[Any, Unused()] = None
    prompt_cache_retention: Annotated[Any, Unused()] = None
    prediction: Annotated[Any, Unused()] = None
    num_draft_tokens: Annotated[Any, Unused()] = None
    guided_decoding_backend: Annotated[Any, Unused()] = None
    spaces_between_special_tokens: Annotated[Any, Unused()] = None
    cache_prompt: Annotated[Any, Unused()] = None
    n_keep: Annotated[Any, Unused()] = None
    n_discard: Annotated[Any, Unused()] = None
    id_slot: Annotated[Any, Unused()] = None
    # Nor do these without those that switch them on, which are below.
    dry_base: Annotated[Any, Unused()] = None
    dry_allowed_length: Annotated[Any, Unused()] = None
    dry_penalty_last_n: Annotated[Any, Unused()] = None
    dry_sequence_breakers: Annotated[Any, Unused()] = None
    dynatemp_exponent: Annotated[Any, Unused()] = None
    mirostat_eta: Annotated[Any, Unused()] = None
    mirostat_tau: Annotated[Any, Unused()] = None
    repeat_last_n: Annotated[Any, Unused()] = None

    store: Annotated[Any, Only((False,))] = None
    service_tier: Annotated[Any, Only(("auto", "default"))] = None
    # vLLM's.
    best_of: Annotated[Any, Only((1,))] = None
    use_beam_search: Annotated[Any, Only((False,))] = None
    early_stopping: Annotated[Any, Only((False,))] = None
    length_penalty: Annotated[Any, Only((1,))] = None
    skip_special_tokens: Annotated[Any, Only((True,))] = None
    truncate_prompt_tokens: Annotated[Any, Only()] = None
    truncation_side: Annotated[Any, Only()] = None
    prompt_logprobs: Annotated[Any, Only()] = None
    allowed_token_ids: Annotated[Any, Only(([],))] = None
    bad_words: Annotated[Any, Only(([],))] = None
    guided_whitespace_pattern: Annotated[Any, Only()] = None
    logits_processors: Annotated[Any, Only(([],))] = None
    return_tokens_as_token_ids: Annotated[Any, Only((False,))] = None
    return_token_ids: Annotated[Any, Only((False,))] = None
    thinking_token_budget: Annotated[Any, Only((-1,))] = None
    cache_salt: Annotated[Any, Only()] = None
    kv_transfer_params: Annotated[Any, Only()] = None
    vllm_xargs: Annotated[Any, Only(({},))] = None
    request_id: Annotated[Any, Only((), "send it as the header X-Request-Id")] = None
    # llama.cpp's.
    repeat_penalty: Annotated[Any, Only((1,), "repetition_penalty replaces it")] = None
    typical_p: Annotated[Any, Only((1,))] = None
    tfs_z: Annotated[Any, Only((1,))] = None
    top_n_sigma: Annotated[Any, Only((-1,))] = None
    dynatemp_range: Annotated[Any, Only((0,))] = None
    dry_multiplier: Annotated[Any, Only((0,))] = None
    mirostat: Annotated[Any, Only((0,))] = None
    min_keep: Annotated[Any, Only((0,))] = None
    n_indent: Annotated[Any, Only((0,))] = None
    n_probs: Annotated[Any, Only((0,), "logprobs replaces it")] = None
    samplers: Annotated[Any, Only()] = None
    grammar: Annotated[Any, Only(("",), "structured_outputs replaces it")] = None
    lora: Annotated[Any, Only(([],), "model or adapters names an adapter")] = None
    t_max_predict_ms: Annotated[Any, Only((-1, 0))] = None
    timings_per_token: Annotated[Any, Only((False,))] = None
    return_progress: Annotated[Any, Only((False,))] = None
    return_tokens: Annotated[Any, Only((False,))] = None
    post_sampling_probs: Annotated[Any, Only((False,))] = None
    response_fields: Annotated[Any, Only(([],))] = None
    image_data: Annotated[Any, Only(([],))] = None
    # mlx-lm's.
    draft_model: Annotated[Any, Only(("default_model",), "the operator chooses it")] = None

    @model_validator(mode="after")
    def _agree(self) -> "Generation":
        given = [name for name in _GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise Refusal(f"{given[0]} and {given[1]} exclude each other", param=given[1])
        most = self._max_tokens
        if most is not None and self.min_tokens > most:
            raise Refusal(f"min_tokens, {self.min_tokens}, is more than max_tokens, {most}", param="min_tokens")
        return self

    @abstractmethod
    def answer(self, request_id: str, created: int) -> ApiAnswer:
        """The builder of the answer. ``created``: seconds since 1970."""

    @property
    def _max_tokens(self) -> int | None:
        """The first of the three names that is given."""
        named = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        return next((value for value in named if value is not None), None)

    def _calls(self, prompts: list[Prompt], top_logprobs: int | None, **more: Any) -> Iterator[Generate]:
        """A call for each prompt."""
        if len(prompts) * self.n > MAX_ALL_CHOICES:
            raise Refusal(f"n times the prompts must be at most {MAX_ALL_CHOICES}", param="n")
        sampling = {name: getattr(self, name) for name in Sampling.model_fields}
        chosen = Sampling(**{name: value for name, value in sampling.items() if value is not None})
        for prompt in prompts:
            yield Generate(
                n=self.n,
                model=self.model,
                adapter=self.adapters,
                prompt=prompt,
                max_tokens=self._max_tokens,
                min_tokens=self.min_tokens,
                ignore_eos=self.ignore_eos,
                stop=self.stop,
                stop_token_ids=self.stop_token_ids,
                include_stop=self.include_stop_str_in_output,
                seed=None if self.seed is None else self.seed % (1 << 64),
                sampling=chosen,
                top_logprobs=top_logprobs,
                grammar=next((found for name in _GRAMMARS if (found := getattr(self, name))), None),
                priority=self.priority,
                **more,
            )
