"""Model parallelism: layers, and whole models, of which every rank holds a part."""

from .column_parallel import ColumnParallelLinear, QuantizedColumnParallelLinear
from .experts import ExpertParallelSwitchGLU
from .loading import load_sharded
from .lora import LoRALinear
from .mappings import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
)
from .parallel_attention import ParallelAttention
from .parallel_mlp import ParallelMLP
from .plan import Plan, Shard, plan_shards, shard_model
from .row_parallel import QuantizedRowParallelLinear, RowParallelLinear
from .sampling import (
    VocabParallelSampler,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
    vocab_parallel_log_probs,
)
from .split import SplitBlock, SplitModel, Submissions, submissions
from .verify import Verification, verify
from .vocab_parallel import (
    ParallelLMHead,
    QuantizedParallelLMHead,
    QuantizedVocabParallelEmbedding,
    VocabParallelEmbedding,
)

__all__ = [
    "ColumnParallelLinear",
    "ExpertParallelSwitchGLU",
    "LoRALinear",
    "ParallelAttention",
    "ParallelLMHead",
    "ParallelMLP",
    "Plan",
    "QuantizedColumnParallelLinear",
    "QuantizedParallelLMHead",
    "QuantizedRowParallelLinear",
    "QuantizedVocabParallelEmbedding",
    "RowParallelLinear",
    "Shard",
    "SplitBlock",
    "SplitModel",
    "Submissions",
    "Verification",
    "VocabParallelEmbedding",
    "VocabParallelSampler",
    "copy_to_tensor_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "load_sharded",
    "plan_shards",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
    "shard_model",
    "submissions",
    "verify",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_probs",
]
