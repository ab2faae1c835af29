"""Hosts and the links between them as a graph."""
