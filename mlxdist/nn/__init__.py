"""Model parallelism: layers, and full models, that are sharded over the ranks.

models/             plans, loading and verification of full models; context_parallel/, pipeline_parallel/, split_block/,
                    expert_parallel/, tensor_parallel/: what they are made of; layout/: the ground of all
equal_inputs.py     what the ranks that share a model compare of its arguments
adapters_of_rows.py adapters_of_rows
mappings.py         copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region,
                    scatter_to_tensor_parallel_region, gather_from_tensor_parallel_region,
                    gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region
interception.py     the one way in which a module gets other methods; rank_checks.py: one error on all ranks
"""

from mlxdist.nn.models.load import load_sharded
from mlxdist.nn.models.plan import shard_model
from mlxdist.nn.split_block import submissions

from .adapters_of_rows import adapters_of_rows
from .context_parallel import (
    context_parallel,
    gather_sequence,
    prefill,
    ring_attention,
    shard_sequence,
    ulysses_attention,
)
from .expert_parallel import ExpertParallelSwitchGLU
from .mappings import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
)
from .models.pipeline_batch_generator import PipelineBatchGenerator
from .models.plan import Plan, Shard, plan_shards
from .models.split_model import SplitModel
from .models.verify import Verification, verify
from .pipeline_parallel import (
    Action,
    Schedule,
    Stage,
    StagePlan,
    Timeline,
    pipeline_parallel,
    pipeline_schedule,
    plan_stages,
)
from .split_block import SplitBlock, Submissions
from .tensor_parallel.column_parallel import ColumnParallelLinear, QuantizedColumnParallelLinear
from .tensor_parallel.lora import LoRALinear
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
