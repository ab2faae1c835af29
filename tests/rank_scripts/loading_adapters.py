"""One rank of test_loading.py: models with adapters of mlx-lm. Arguments: scenarios, and a directory for files.

Prints "right" after each scenario. Rank 0 saves what mlx-lm's training would save.
"""

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
from loading import MIXTRAL, QWEN3, base, edit, expect, group, make, rank, save, size
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

import mlxdist
from mlxdist import lm
from mlxdist.nn.models.load import load_sharded
from mlxdist.nn.models.load.adapters import CONFIG, WEIGHTS


def adapters() -> None:
    """Adapters of mlx-lm's LoRA training, and fully trained weights ("full"). verify() compares with mlx-lm."""
    for name, config, bits in (("lora-qwen3", QWEN3, None), ("lora-bits", QWEN3, 4), ("lora-mixtral", MIXTRAL, None)):
        directory = save(name, *make(config, bits=bits))
        path = save_adapters(directory)
        for streamed in (False, True):
            mine = path if rank == 0 or not streamed else None
            model, _ = load_sharded(directory, adapter_path=mine, stream=streamed, verify=True)
        plain, _ = load_sharded(directory)
        tokens = mx.array([[1, 2, 3]])
        assert not mx.allclose(model(tokens), plain(tokens), atol=1e-2).item(), "the adapters do nothing"
        generating, _ = lm.load(str(directory), adapter_path=str(path))
        assert mx.allclose(model(tokens), generating(tokens), rtol=1e-4, atol=1e-4).item()  # blocks may round otherwise
    directory = save("full-qwen3", *make(QWEN3))
    load_sharded(directory, adapter_path=save_adapters(directory, kind="full"), verify=True)
    save_adapters(directory)
    reject_adapters(directory)
    print("right")


def save_adapters(directory: Path, kind: str = "lora", drop: str = "") -> Path:
    """As mlx-lm's training does, on rank 0."""
    path = directory / f"adapters-{kind}{drop}"
    if rank == 0:
        model, _ = load_model(directory)
        settings = {"rank": 4, "scale": 2.0, "dropout": 0.1}
        model.freeze()
        if kind == "full":
            model.layers[-1].unfreeze()
        else:
            linear_to_lora_layers(model, -1, settings)
        mx.random.seed(3)
        values = {name: mx.random.normal(a.shape) * 0.3 for name, a in tree_flatten(model.trainable_parameters())}
        path.mkdir()
        mx.save_safetensors(str(path / "adapters.safetensors"), {n: a for n, a in values.items() if n != drop})
        config = {"fine_tune_type": kind, "num_layers": -1, "lora_parameters": settings}
        (path / "adapter_config.json").write_text(json.dumps(config))
    group.barrier()
    return path


def reject_adapters(directory: Path) -> None:
    missing = save_adapters(directory, drop="model.layers.0.self_attn.k_proj.lora_b")
    expect(mlxdist.InvalidArgument, ["does not have", "k_proj.lora_b"], load_sharded, directory, adapter_path=missing)
    expect(mlxdist.InvalidArgument, ["adapter_config.json"], load_sharded, directory, adapter_path=base)
    expect(mlxdist.InvalidArgument, ["no adapter_path"], lm.load, with_code(directory), adapter_path=str(missing))
    here = with_code(directory) if rank == 0 and size > 1 else directory
    expect(mlxdist.Mismatch, ["model_file"], lm.load, str(here)) if size > 1 else None
    other = save_adapters(save("lora-other", *make(QWEN3 | {"hidden_size": 32})))
    reads, module = [], sys.modules["mlxdist.nn.models.load.load_sharded"]
    read_shards, module._load_shards = module._load_shards, lambda *arguments: reads.append(arguments)
    expect(mlxdist.InvalidArgument, ["is not that of this model"], load_sharded, directory, adapter_path=other)
    module._load_shards = read_shards
    assert not reads, "found only after the weights were read"
    other = save_adapters(directory, kind="dora")
    expect(mlxdist.InvalidArgument, ["'dora' cannot be sharded"], load_sharded, directory, adapter_path=other)
    reject_damaged_adapters(directory)
    if size > 1:
        here = other if rank == 0 else missing
        expect(mlxdist.Mismatch, ["disagree about the adapters"], load_sharded, directory, adapter_path=here)


def reject_damaged_adapters(directory: Path) -> None:
    """Files that mlx-lm or MLX would take, or fail over on one rank only."""
    good = directory / "adapters-lora"
    config, first = json.loads((good / CONFIG).read_text()), "model.layers.0.self_attn.q_proj.lora_a"
    parameters = config["lora_parameters"]
    weights = (good / WEIGHTS).read_bytes()
    length = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + length])
    start = header[first.replace("lora_a", "lora_b")]["data_offsets"][0]
    bytes_of_first = header[first]["data_offsets"][1] - header[first]["data_offsets"][0]
    overlapping = {"data_offsets": [start, start + bytes_of_first]}
    full = (directory / "adapters-full" / WEIGHTS).read_bytes().replace(b'"F32"', b'"I32"')
    for words, settings, change, data in [
        (["lora_parameters is 'scale', not an object"], {"lora_parameters": "scale"}, {}, weights),
        (
            ["lora_parameters.scale is 'x', not a finite number"],
            {"lora_parameters": parameters | {"scale": "x"}},
            {},
            weights,
        ),
        (
            ["lora_parameters.rank is 2147483647, not a whole number from 1 to 65536"],
            {"lora_parameters": parameters | {"rank": 2**31 - 1}},
            {},
            weights,
        ),
        (["num_layers is None, not a whole number"], {"num_layers": None}, {}, weights),
        (["more than 1000000"], {"more": "x" * 10**6}, {}, weights),
        ([first, "int32"], {}, {"dtype": "I32"}, weights),
        (["is damaged", "tensor"], {}, overlapping, weights),
        (["int32 of shape"], {"fine_tune_type": "full"}, {}, full),
    ]:
        bad = directory / "bad adapters"
        if rank == 0:
            bad.mkdir(exist_ok=True)
            (bad / CONFIG).write_text(json.dumps(config | settings))
            if change:
                text = json.dumps(header | {first: header[first] | change}).encode()
                data = len(text).to_bytes(8, "little") + text + data[8 + length :]
            (bad / WEIGHTS).write_bytes(data)
        group.barrier()
        expect(mlxdist.InvalidArgument, words, load_sharded, directory, adapter_path=bad)


def with_code(directory: Path) -> str:
    """The same model with code of its own, in a directory of each rank."""
    copy = base / f"{directory.name} with code on {rank}"
    if not copy.exists():
        shutil.copytree(directory, copy)
        edit(copy, model_file="model.py")
    return str(copy)


if __name__ == "__main__":
    for scenario in sys.argv[1].split(","):
        globals()[scenario]()
