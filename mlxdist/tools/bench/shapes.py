"""The layers of experts that benchmarks measure, and the ways to compute them."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["AUTO", "COMPILED", "INSIDE", "ONE_PROCESS", "RING", "SHAPES", "Shape"]

ONE_PROCESS, RING, AUTO, COMPILED, INSIDE = "one process", "mlx-lm on ring", "auto", "compiled", "sharded inside"


@dataclass(frozen=True)
class Shape:
    """Of a layer of experts, in the names of mlx-lm's arguments for a model."""

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    scale: int  # divides widths by default: a call of 512 tokens then takes less than a second
    norm_topk_prob: bool = True

    @property
    def described(self) -> str:
        sizes = f"{self.hidden_size}x{self.moe_intermediate_size}"
        return f"{sizes}, top {self.num_experts_per_tok} of {self.num_experts}"

    def scaled(self, scale: int | None) -> Shape:
        """Widths divided, at least 32."""
        by = scale or self.scale
        return replace(
            self,
            hidden_size=max(32, self.hidden_size // by),
            moe_intermediate_size=max(32, self.moe_intermediate_size // by),
        )


SHAPES = {
    "mixtral": Shape(4096, 14336, 8, 2, scale=16),  # Mixtral 8x7B
    "qwen3.5-moe": Shape(2048, 512, 256, 8, scale=8),  # Qwen3.5-35B-A3B, without its shared expert
}
