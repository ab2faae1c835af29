"""`mlxdist doctor --report FILE`: what a maintainer needs to know of hosts that only a volunteer can reach."""
