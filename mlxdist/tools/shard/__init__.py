"""`mlxdist shard`: the plan for a sharded model, and a test that the shards compute the same."""
