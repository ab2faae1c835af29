"""Tensor parallelism: layers that are sharded over the ranks.

column_parallel.py                   ColumnParallelLinear, QuantizedColumnParallelLinear
row_parallel.py                      RowParallelLinear, QuantizedRowParallelLinear
parallel_linear.py                   what both have in common; linear_layers.py: MLX's layers that they are made of
parallel_attention.py                ParallelAttention
parallel_mlp.py                      ParallelMLP
vocab_parallel.py                    VocabParallelEmbedding, QuantizedVocabParallelEmbedding,
                                     ParallelLMHead, QuantizedParallelLMHead
sampling.py                          vocab_parallel_argmax, vocab_parallel_cross_entropy, vocab_parallel_log_probs,
                                     VocabParallelSampler: what is computed of logits of which a rank has a shard
lora.py                              LoRALinear: adapters on these layers; multi_lora.py: several at once
"""
