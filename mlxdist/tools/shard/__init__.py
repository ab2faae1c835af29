"""`mlxdist shard`: how a model would be cut, and whether it then computes the same."""
