"""Full models of mlx-lm: how they are sharded over ranks, loaded, verified and run.

plan/                        Plan, Shard, plan_shards, shard_model: how a model is sharded
load/                        load_sharded: each rank reads its shard alone
mtp_head.py                  MtpHead, load_mtp_head: heads for multi-token prediction, sharded as the model
cuts.py                      how the parameters of a rank are parts of those of the full model
verify.py                    Verification, verify: a sharded model compared with the full one
split_model.py               SplitModel: layers of split_block/
pipeline_batch_generator.py  PipelineBatchGenerator: generation by stages with several batches on their way
"""
