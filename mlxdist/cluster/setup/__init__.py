"""`mlxdist config`: finds the links between hosts, gives their ends addresses, and writes both to the hostfile."""
