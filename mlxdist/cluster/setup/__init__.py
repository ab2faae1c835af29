"""`mlxdist config`: the links between hosts, addresses for their ends, and the hostfile with both."""
