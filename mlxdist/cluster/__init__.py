"""Hosts, their links and how they are reached. The floor between base and runtime: it needs no MLX."""
