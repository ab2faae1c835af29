"""The configuration file of `mlxdist train`: what it takes, and what it rejects with one sentence."""

import copy
import dataclasses

import pytest

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.validation import checks_of
from mlxdist.train.config import _TABLES, CheckpointConfig, ControlConfig, MeshConfig, TrainConfig

LEAST = 'model = "m"\ndata = "d"\n'


def read(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return TrainConfig.read(path)


def test_a_byte_order_mark_is_not_read(tmp_path):
    assert read(tmp_path, "\ufeff" + LEAST).model == "m"


def test_defaults_are_those_of_mlx_lm(tmp_path):
    from mlx_lm.lora import CONFIG_DEFAULTS

    config = read(tmp_path, LEAST)
    differ = {"model", "data", "seed", "optimizer_config", "lr_schedule", "project_name", "report_to"}
    for name in vars(config).keys() & CONFIG_DEFAULTS.keys() - differ:
        assert getattr(config, name) == CONFIG_DEFAULTS[name], name


def test_all_of_it(tmp_path):
    text = """
model = "m"
data = "d"
fine_tune_type = "full"
iters = 12
grad_accumulation_steps = 4
skip_steps = [3, 4]
optimizer_config = {weight_decay = 0.1}
[mesh]
dp = 2
tp = 2
[checkpoints]
every = 5
resume = true
"""
    config = read(tmp_path, text)
    assert (config.steps, config.skip_steps, config.optimizer_config) == (3, (3, 4), {"weight_decay": 0.1})
    assert config.mesh == MeshConfig(dp=2, tp=2)
    assert config.checkpoints == CheckpointConfig(every=5, resume=True)


def test_every_default_may_be_written():
    """Also those that their check would reject, such as 0 for none; in another type they are none."""
    for table, kind in {"": TrainConfig, **_TABLES}.items():
        of_table = {one.name: one for one in dataclasses.fields(kind)}
        for name in checks_of(kind):
            default = of_table[name].default
            if default is dataclasses.MISSING and of_table[name].default_factory is not dataclasses.MISSING:
                default = of_table[name].default_factory()
            if default is dataclasses.MISSING or default is None:
                continue
            written = type(default)(list(default)) if isinstance(default, tuple) else copy.deepcopy(default)
            written = float(repr(default)) if type(default) is float else written  # equal, and another object
            given = {name: written}
            config = TrainConfig.from_mapping({"model": "m", "data": "d", **({table: given} if table else given)})
            found = getattr(getattr(config, table) if table else config, name)
            assert (found, type(found)) == (default, type(default)), name
    with pytest.raises(InvalidArgument, match=r"^control\.hours is False"):
        ControlConfig(hours=False)
    with pytest.raises(InvalidArgument, match=r"^mesh\.pp is True"):
        MeshConfig(pp=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [("[control]\nhours = 0.0", 0.0), ("[control]\nhours = 0", 0.0), ("router_aux_loss_coef = 0.0", 0.0)],
)
def test_a_default_of_the_file(tmp_path, text, value):
    config = read(tmp_path, LEAST + text)
    assert (config.control.hours, config.router_aux_loss_coef) == (value, value)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "model is missing"),
        ('model = "m"', "data is missing"),
        (LEAST + "batchsize = 4", "there is no setting batchsize; did you mean batch_size?"),
        (LEAST + "zzzz = 4", "there is no setting zzzz; there are model, data"),
        (LEAST + "[mesh]\nfsd = 4", "there is no setting mesh.fsd; did you mean mesh.fsdp?"),
        (LEAST + '"\\u001b[2J" = 4', "there is no setting ?[2J; there are model"),
        (LEAST + "mesh = 4", "mesh is 4, not a table: write [mesh]"),
        (LEAST + "iters = 0", "iters is 0, not a whole number from 1"),
        (LEAST + "iters = true", "iters is True, not a whole number"),
        (LEAST + "learning_rate = nan", "learning_rate is nan, not a number above 0"),
        (
            LEAST + '[precision]\ndtype = "int8"',
            "precision.dtype is 'int8', not one of model, float32, bfloat16, float16",
        ),
        (LEAST + "[control]\nmemory_share = 1.5", "control.memory_share is 1.5, not a number from 0 to 1"),
        (LEAST + "x = \ny = 1", "at line 3"),
        (LEAST + 'model = "m"', "Cannot overwrite a value"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_rejected(tmp_path, text, expected):
    with pytest.raises(InvalidArgument) as raised:
        read(tmp_path, text)
    assert expected in str(raised.value) and "config.toml" in str(raised.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidArgument, match="No such file"):
        TrainConfig.read(tmp_path / "missing.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(InvalidArgument, match="more than 1000000 bytes"):
        TrainConfig.read(tmp_path / "large.toml")


def test_a_mapping_and_fields_are_checked_as_the_file(tmp_path):
    config = TrainConfig.from_mapping({"model": "m", "data": "d", "skip_steps": [3], "mesh": {"dp": 2}})
    assert config == read(tmp_path, LEAST + "skip_steps = [3]\n[mesh]\ndp = 2")
    assert config == TrainConfig(model="m", data="d", skip_steps=(3,), mesh=MeshConfig(dp=2))
    with pytest.raises(InvalidArgument, match=r"there is no setting mesh\.fsd; did you mean mesh\.fsdp\?"):
        TrainConfig.from_mapping({"model": "m", "data": "d", "mesh": {"fsd": 2}})
    with pytest.raises(InvalidArgument, match=r"^mesh\.dp is 0\.5, not a whole number from -1"):
        MeshConfig(dp=0.5)
    with pytest.raises(InvalidArgument, match="^iters is 0, not a whole number from 1"):
        TrainConfig(model="m", data="d", iters=0)
