"""Models as files: `mlxdist tiny-model` makes small ones.

tiny_model.py   a small model with random weights; small_config.py: its sizes
"""
