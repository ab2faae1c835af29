"""`mlxdist doctor --report FILE`: facts for a maintainer about hosts that only a volunteer can reach."""
