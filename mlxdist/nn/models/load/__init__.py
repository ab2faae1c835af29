"""Loading a model so that each rank reads and holds only its shard.

load_sharded.py    load_sharded
parts_of_ranks.py  what ranks read, and whether a host that has shards alone has that
weight_sources.py  which tensor of which file a parameter of the model is
mtp_format.py      the names of weights that mlx-lm leaves out, of heads for multi-token prediction
streaming.py       from rank 0 to the others, in chunks with checksums
adapters.py        of mlx-lm's lora training, on the model that is sharded
weight_checks.py   whether all ranks hold shards of the same model
"""

from .load_sharded import LoadReport, load_sharded

__all__ = ["LoadReport", "load_sharded"]
