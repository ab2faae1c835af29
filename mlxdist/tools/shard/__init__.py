"""`mlxdist shard`: how a model would be sharded, and whether it then computes the same."""
