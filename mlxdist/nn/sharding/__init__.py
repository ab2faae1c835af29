"""How a model is sharded over ranks: the plan, the loader and the proof."""
