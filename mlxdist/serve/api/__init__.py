"""OpenAI's HTTP API, as types: requests to calls of rank 0, and its events to answers. It has no MLX and no mlx-lm.

fields.py       the body of a request, and the rules of its fields
generation.py   the fields that chats and completions share; structured.py: those of structured output
chat.py         /v1/chat/completions; messages.py: messages and tools
completions.py  /v1/completions
tokenize.py     /tokenize and /detokenize
models.py       /v1/models
answers.py      answers and the chunks of streams
"""

from .answers import ApiAnswer
from .chat import ChatRequest
from .completions import CompletionRequest
from .fields import check, parse
from .models import model_object, models_list
from .tokenize import DetokenizeRequest, TokenizeRequest

__all__ = [
    "ApiAnswer",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "TokenizeRequest",
    "check",
    "model_object",
    "models_list",
    "parse",
]
