"""Modules that stand in the place of another, whose attributes code of mlx-lm goes on reading."""

from typing import Any

import mlx.nn as nn

__all__ = ["InPlaceOf"]


class InPlaceOf(nn.Module):
    """What it does not have is looked up in the submodule that ``original`` names."""

    original: str

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == self.original:  # before it is set
                raise
            return getattr(getattr(self, self.original), name)
