"""Model parallelism: layers, and full models, of which every rank holds a shard."""

from mlxdist.nn.sharding.load import load_sharded
from mlxdist.nn.sharding.plan import shard_model
from mlxdist.nn.split_block import submissions

from .context import context_parallel, gather_sequence, prefill, ring_attention, shard_sequence, ulysses_attention
from .experts import ExpertParallelSwitchGLU
from .mappings import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
)
from .pipeline import (
    Action,
    PipelineBatchGenerator,
    Schedule,
    Stage,
    StagePlan,
    Timeline,
    pipeline_parallel,
    pipeline_schedule,
    plan_stages,
)
from .sharding.plan import Plan, Shard, plan_shards
from .sharding.verify import Verification, verify
from .split_block import SplitBlock, SplitModel, Submissions
from .tensor_parallel.column_parallel import ColumnParallelLinear, QuantizedColumnParallelLinear
from .tensor_parallel.lora import LoRALinear
from .tensor_parallel.multi_lora import adapters_of_rows
from .tensor_parallel.parallel_attention import ParallelAttention
from .tensor_parallel.parallel_mlp import ParallelMLP
from .tensor_parallel.row_parallel import QuantizedRowParallelLinear, RowParallelLinear
from .tensor_parallel.sampling import (
    VocabParallelSampler,
    vocab_parallel_argmax,
    vocab_parallel_cross_entropy,
    vocab_parallel_log_probs,
)
from .tensor_parallel.vocab_parallel import (
    ParallelLMHead,
    QuantizedParallelLMHead,
    QuantizedVocabParallelEmbedding,
    VocabParallelEmbedding,
)

__all__ = [
    "Action",
    "ColumnParallelLinear",
    "ExpertParallelSwitchGLU",
    "LoRALinear",
    "ParallelAttention",
    "ParallelLMHead",
    "ParallelMLP",
    "PipelineBatchGenerator",
    "Plan",
    "QuantizedColumnParallelLinear",
    "QuantizedParallelLMHead",
    "QuantizedRowParallelLinear",
    "QuantizedVocabParallelEmbedding",
    "RowParallelLinear",
    "Schedule",
    "Shard",
    "SplitBlock",
    "SplitModel",
    "Stage",
    "StagePlan",
    "Submissions",
    "Timeline",
    "Verification",
    "VocabParallelEmbedding",
    "VocabParallelSampler",
    "adapters_of_rows",
    "context_parallel",
    "copy_to_tensor_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "gather_sequence",
    "load_sharded",
    "pipeline_parallel",
    "pipeline_schedule",
    "plan_shards",
    "plan_stages",
    "prefill",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "ring_attention",
    "scatter_to_tensor_parallel_region",
    "shard_model",
    "shard_sequence",
    "submissions",
    "ulysses_attention",
    "verify",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_probs",
]
