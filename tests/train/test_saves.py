"""The saves of `mlxdist train`, in one process: the warning where they take much of the time. What happens where one
fails is in test_checkpoint_ranks.py."""

import mlx.core as mx

import mlxdist
from mlxdist.train import Checkpoints
from mlxdist.train.config import CheckpointConfig
from mlxdist.train.saves import Saves


def test_saves_that_take_much_of_the_time(tmp_path, capfd):
    """Those of long ago do not, the last one does not count, and there is one warning."""
    with Checkpoints(tmp_path) as checkpoints:
        settings = CheckpointConfig(every=7, every_minutes=0.5)
        saves = Saves(checkpoints, {"w": mx.ones(1000)}, settings, mlxdist.init())
        for step, before in enumerate((10_000, 10_000, 0, 0), 1):
            saves._ended -= before
            assert 0 < saves.save(step, is_last=False) < 100
            said = capfd.readouterr().err
            assert said.startswith("mlxdist: saves take ") == (step == 3), said
            if said:
                assert "; raise every = 7 and every_minutes = 0.5 in [checkpoints]: one save in " in said
        Saves(checkpoints, {"w": mx.ones(1000)}, settings, mlxdist.init()).save(5, is_last=True)
        assert capfd.readouterr().err == ""
