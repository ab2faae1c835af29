"""Prompt caches of mlx-lm from some ranks to others, so that some ranks compute prompts and others generate.

Rank 0 calls ``kv.send(cache, 1, model=model)`` after ``model(prompt, cache=cache)``, and rank 1
``cache = kv.recv(0, model=model)``. Where the model is sharded or staged, ranks 0 and 1 call
``kv.send(cache, [2, 3], model=model)``, and ranks 2 and 3 ``cache = kv.recv([0, 1], model=model)``: tensor parallelism
and stages may differ on the two sides. For many transfers of one model ``layout_of`` (cache_layout.py) finds once what
each of them needs to know about it.
"""

from .cache_layout import layout_of
from .transfer import recv, send

__all__ = ["layout_of", "recv", "send"]
