"""The HTTP APIs, as types: requests to calls of rank 0, and its events to answers. It has no MLX and no mlx-lm.

fields.py       the body of a request, and the rules of its fields
generation.py   the fields that chats and completions share; structured.py: those of structured output
chat.py         /v1/chat/completions; messages.py: messages and tools
completions.py  /v1/completions
tokenize.py     /tokenize and /detokenize
models.py       /v1/models
answers.py      answers and the chunks of streams
anthropic.py    /v1/messages and /v1/messages/count_tokens; anthropic_answers.py: their answers
stable_heads.py parts of system prompts that change with each request
responses.py    /v1/responses; responses_answers.py: its answers; response_store.py: conversations that it keeps
blocks.py       answers of blocks, one after the other, as the last two APIs have
"""

from .answers import ApiAnswer
from .anthropic import CountTokensRequest, MessagesRequest
from .chat import ChatRequest
from .completions import CompletionRequest
from .fields import check, parse
from .models import model_object, models_list
from .response_store import ResponseStore
from .responses import ResponsesRequest
from .tokenize import DetokenizeRequest, TokenizeRequest

__all__ = [
    "ApiAnswer",
    "ChatRequest",
    "CompletionRequest",
    "CountTokensRequest",
    "DetokenizeRequest",
    "MessagesRequest",
    "ResponseStore",
    "ResponsesRequest",
    "TokenizeRequest",
    "check",
    "model_object",
    "models_list",
    "parse",
]
