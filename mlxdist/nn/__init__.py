"""Model parallelism: layers, and whole models, of which every rank holds a part."""

from .column_parallel import ColumnParallelLinear, QuantizedColumnParallelLinear
from .lora import LoRALinear
from .mappings import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
)
from .row_parallel import QuantizedRowParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "LoRALinear",
    "QuantizedColumnParallelLinear",
    "QuantizedRowParallelLinear",
    "RowParallelLinear",
    "copy_to_tensor_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
]
