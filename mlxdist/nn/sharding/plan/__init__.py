"""How a whole model is cut: a plan made from its own shard() or from names and shapes, and carried out.

plan.py         Plan, plan_shards: what each rank holds of every parameter; table.py prints it
parameters.py   Shard: one parameter of a plan
own_shard.py    what the model's own shard() cuts, observed
patterns.py     names of projections, heads and experts; blocks.py and block_parts.py find them in a model
shard_model.py  carries a plan out, in place
layers.py       the linear layers of cut blocks, which take adapters
borders.py      what makes a cut block train as the whole one; own_borders.py: what the model's shard() has cut
"""

from .parameters import Shard
from .plan import OWN_SHARD, PATTERNS, WHOLE, Plan, plan_shards
from .shard_model import shard_model

__all__ = ["OWN_SHARD", "PATTERNS", "WHOLE", "Plan", "Shard", "plan_shards", "shard_model"]
