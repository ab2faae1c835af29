"""Describes what a rank holds of a dimension, an array and a model: the ground that all parallel layers stand on.

partition.py        a dimension, in equal shards or by the ranks' shares
measured_shares.py  the shares that `mlxdist calibrate` has measured
cut.py              Cut: how one rank's array is a part of a full one
modules.py          the modules and parameters of a model by their paths
"""
