"""`mlxdist doctor`: finds what would go wrong with a job on these hosts before it starts."""
