"""How a full model is sharded: a plan made from its own shard() or from names and shapes, and carried out.

plan.py             Plan, plan_shards: what each rank holds of every parameter; table.py prints it, plan_json.py
reads it
parameters.py       Shard: one parameter of a plan
own_shard.py        what the model's own shard() shards, observed
patterns.py         names of projections, heads and experts; blocks.py and block.py find them in a model
shard_model.py      carries a plan out, in place
layers.py           the linear layers of sharded blocks; adapters.py: the adapters on them
parallel_region.py  what makes a sharded block train as the full one
"""

from .parameters import Shard
from .plan import OWN_SHARD, PATTERNS, UNSHARDED, Plan, plan_shards
from .shard_model import shard_model

__all__ = ["OWN_SHARD", "PATTERNS", "UNSHARDED", "Plan", "Shard", "plan_shards", "shard_model"]
