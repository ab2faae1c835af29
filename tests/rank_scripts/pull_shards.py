"""Scenarios of test_pull_shards.py. Arguments: a scenario, and a directory, in which each rank has a host's own."""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import patch

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes
from scenarios import group, rank, run_scenario, size

from mlxdist.base.errors import Error, InvalidArgument, ResourceError
from mlxdist.base.host_shards import ShardCheckpoint, find_shards, open_checkpoint
from mlxdist.base.model_directory import find_model
from mlxdist.base.safetensors_reader import Checkpoint
from mlxdist.nn.layout.modules import parameters
from mlxdist.nn.models.load import load_sharded
from mlxdist.nn.models.load.weight_checks import fingerprint
from mlxdist.serve.placement import Layout, place
from mlxdist.tools.models.inventory import list_here
from mlxdist.tools.models.only_shards import shards_of_hosts
from mlxdist.tools.models.places import Folder, HubCache
from mlxdist.tools.models.spread import Spread, spread
from mlxdist.tools.models.transfer import partial_path

HEADS = 2 * size
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2 * size,
    "intermediate_size": 64 * size,
    "num_attention_heads": HEADS,
    "num_key_value_heads": size,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# Its experts' weights are stacks of three dimensions, which are cut along another axis than those of other layers.
MIXTURE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 2 * size,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64 * size,
    "norm_topk_prob": True,
}
FILES = 3
SAMPLE = 512  # bytes of a tensor that a host does not have all of
SMALL = 1024  # a tensor of no more is its own sample
REST = {"generation_config.json": b"{}", "notes/more.txt": b"more"}


def make(folder: Path, config: dict = QWEN3, bits: int | None = 4) -> Path:
    """Writes a model as mlx-lm does, in several files."""
    mx.random.seed(0)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.update(tree_map(lambda x: (x * 3).astype(mx.bfloat16), model.parameters()))
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config = config | {"quantization": {"group_size": 32, "bits": bits}}
    weights = dict(tree_flatten(model.parameters()))
    folder.mkdir(parents=True)
    index = {}
    for number, part in enumerate(np.array_split(list(weights), FILES)):
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in part}, metadata={"format": "mlx"})
        index |= {str(name): file for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in REST.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def own(directory: str) -> Path:
    """The folder of this rank's host; rank 0 has the model there."""
    return Path(directory, f"rank{rank}", "model")


def full(directory: str) -> Path:
    return Path(directory, "rank0", "model")


def start(directory: str, config: dict = QWEN3, **options: object) -> Path:
    if rank == 0:
        make(own(directory), config, **options)
    group.barrier()
    return own(directory)


def bring(folder: Path | HubCache, **options: object) -> Spread:
    return spread(group, folder if isinstance(folder, HubCache) else Folder(folder), **options)


def by(each: int = 1, **layout: object) -> dict[str, object]:
    return {"plan_hosts": partial(shards_of_hosts, hosts=[each] * size, layout=layout)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(words: str, call: object, *arguments: object, kinds: object = InvalidArgument, **options: object) -> None:
    try:
        call(*arguments, **options)
    except kinds as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was wrong with {words!r}")


def expected(directory: str, model: nn.Module, held: int) -> int:
    """The bytes that a host gets that reads the shards in ``model``, ``held`` of them, and each tensor at most once."""
    checkpoint = Checkpoint(full(directory))
    there = parameters(model)
    count = held + sum(len(file.header) for file in checkpoint.files)
    for name, tensor in checkpoint.tensors.items():
        if name not in there or there[name].nbytes < tensor.nbytes:
            count += SAMPLE if tensor.nbytes > SMALL else tensor.nbytes
    others = [path for path in full(directory).rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    return count + sum(path.stat().st_size for path in others)


def assert_same_model(folder: Path, directory: str, **options: object) -> nn.Module:
    """Loads from this host's folder and from the full model; parameters and logits are the same."""
    before = group.stats()["payload_bytes_sent"]
    model, _ = load_sharded(folder, **options)
    whole, _ = load_sharded(full(directory), **options)
    assert group.stats()["payload_bytes_sent"] - before < 100_000
    mine, theirs = parameters(model), parameters(whole)
    assert mine.keys() == theirs.keys() and mine
    for name in mine:
        assert mx.array_equal(mine[name], theirs[name]).item(), name
    tokens = mx.array([[1, 5, 7, 11]])
    assert mx.array_equal(model(tokens), whole(tokens)).item()
    return model


def arrive(directory: str, config: dict, options: dict[str, int], **layout: object) -> None:
    folder = start(directory, config)
    sent = group.stats()["payload_bytes_sent"]
    done = bring(folder, **by(**layout))
    sent = group.stats()["payload_bytes_sent"] - sent
    model = assert_same_model(folder, directory, **options)
    count = 0 if rank == 0 else expected(directory, model, sum(array.nbytes for array in parameters(model).values()))
    assert done.received[rank] == count, (done, count)
    assert done.shards[0] == "" and all(done.shards[1:]), done
    total = sum(done.received)
    assert total < (size - 1) * done.size
    if rank == 0:
        # With more ranks the source sends in groups of two, which count for themselves.
        assert size > 2 or total <= sent <= total + 200_000 * size, (sent, total)
    else:
        assert isinstance(open_checkpoint(folder), ShardCheckpoint) and not list(folder.glob("*.safetensors"))
        assert sum(map(len, contents(folder).values())) <= count + 100_000  # and the record
    assert bring(folder, **by(**layout)).received == (0,) * size
    assert fingerprint(open_checkpoint(folder)) == fingerprint(Checkpoint(full(directory)))


def tensor_parallel(directory: str) -> None:
    arrive(directory, QWEN3, {"tp": size}, tp=size)
    # The same is planned without a word, as by serve.
    placement = place(own(directory), group, Layout())
    assert_same_model(own(directory), directory, plan=placement.plan)


def experts(directory: str) -> None:
    arrive(directory, MIXTURE, {"tp": size}, tp=size)
    shutil.rmtree(own(directory)) if rank else None
    arrive_again = bring(own(directory), **by(ep=size))
    assert rank == 0 or arrive_again.received[rank]
    assert_same_model(own(directory), directory, tp=1, ep=size)


def stages(directory: str) -> None:
    arrive(directory, QWEN3, {"pp": size, "tp": 1}, pipeline=True)


def several_ranks_on_a_host(directory: str) -> None:
    """Each host has two ranks, so all ranks of this job can load what a host has."""
    folder = start(directory)
    done = bring(folder, **by(each=2, tp=1, pipeline=True))
    assert rank == 0 or f"ranks {2 * rank} and {2 * rank + 1} of {2 * size}" in done.shards[rank], done
    assert_same_model(folder, directory, tp=1, pp=size)


def refused(directory: str) -> None:
    """A job with another plan, or that reads all weights, does not begin."""
    folder = start(directory)
    bring(folder, **by(tp=size))
    words = f"has just the shards of rank 1 of {size}, tp={size}, and "
    with_command = f"mlxdist pull {own(directory).parents[1] / 'rank1' / 'model'} --hostfile FILE"
    before = group.stats()["payload_bytes_sent"]
    refusal(words, load_sharded, folder, tp=1, pp=size)
    refusal(with_command, load_sharded, folder, tp=1, pp=size)
    refusal("has just the shards of rank ", load_sharded, folder, tp=size, rank_shares=[*[1.0] * (size - 1), 2.0])
    assert group.stats()["payload_bytes_sent"] - before < 100_000
    alone = group.split(rank)
    if rank:
        words = f"has just the shards of rank {rank} of {size}, tp={size}, and "
        refusal(words, load_sharded, folder, group=alone)
        refusal("is missing", Checkpoint, folder)
        refusal("is missing", load_sharded, folder, group=alone, stream=True)
        refusal("has just the shards", load_sharded, folder, group=alone, verify=True)
        refusal("has just the shards", load_sharded, folder, group=alone, get_model_classes=_get_classes)
        # To read a slice that is not on this host is an error, never zeros.
        tensor = next(
            tensor for name, tensor in open_checkpoint(folder).tensors.items() if name.endswith("0.mlp.up_proj.weight")
        )
        refusal(words, tensor.read, 0, [], 0, memoryview(bytearray(tensor.nbytes)))
        refusal(words, tensor.read, 0, [slice(0, 1)], 0, memoryview(bytearray(4)))
        from mlx_lm.utils import load_model

        refusal("No safetensors found", load_model, folder, kinds=FileNotFoundError)
        row = list_here([str(folder.parent)])[-1]
        assert row["shards"] == f"rank {rank} of {size}, tp={size}" and "has just the shards" in row["missing"], row
    # The record and the shards are checked.
    group.barrier()
    if rank:
        record = folder / ".mlxdist-shards" / "record.json"
        kept = record.read_bytes()
        record.write_bytes(b"[" * 100)
        refusal("record.json is damaged", open_checkpoint, folder)
        record.write_bytes(kept)
        shards = find_shards(folder)
        with shards.path(folder, shards.files[0]).open("ab") as file:
            file.write(b"x")
        refusal("is damaged: it has", open_checkpoint, folder)


def other_plan(directory: str) -> None:
    """A second pull, for another plan, takes the place of the first one."""
    folder = start(directory)
    bring(folder, **by(tp=size))
    goes_on_with_other_plan(directory)


def interrupted(directory: str) -> None:
    folder = start(directory)
    bring(folder, **by(tp=size))

    def stop(what: str, done: int, of: int) -> None:
        if rank == 0 and what.startswith("model-00002"):
            raise OSError("stopped")

    refusal("stopped", bring, folder, on_progress=stop, kinds=(Error, OSError), **by(pipeline=True))


def goes_on(directory: str) -> None:
    """Until a second pull, for another plan, has ended, the first one holds."""
    assert_same_model(own(directory), directory, tp=size)
    first = Checkpoint(full(directory)).files[0]
    received = goes_on_with_other_plan(directory).received
    assert rank == 0 or 0 < received[rank] < sum(path.stat().st_size for path in full(directory).iterdir()) - first.size


def goes_on_with_other_plan(directory: str) -> Spread:
    folder = own(directory)
    done = bring(folder, **by(pipeline=True))
    assert_same_model(folder, directory, tp=1, pp=size)
    assert rank == 0 or len(list((folder / ".mlxdist-shards").iterdir())) == 2
    return done


def resumed(directory: str) -> None:
    """A pull keeps what an interrupted one has left, where it is right."""
    folder = start(directory)
    bring(folder, **by(tp=size))
    received = 0
    if rank:
        shards = find_shards(folder)
        (folder / ".mlxdist-shards" / "record.json").unlink()
        whole = shards.path(folder, shards.files[1])
        received = shards.files[1].packed // 3
        partial_path(whole).write_bytes(whole.read_bytes()[:-received])
        whole.unlink()
        damaged = shards.path(folder, shards.files[2])
        damaged.write_bytes(bytes(damaged.stat().st_size))
        received += damaged.stat().st_size
        refusal("is missing", open_checkpoint, folder)
    done = bring(folder, **by(tp=size))
    assert done.received[rank] == received, (done, received)
    assert_same_model(folder, directory, tp=size)


def whole_afterwards(directory: str) -> None:
    """A pull of all of it completes the folder; a later one of shards leaves it whole."""
    folder = start(directory)
    bring(folder, **by(tp=size))
    done = bring(folder)
    assert done.shards == ("",) * size
    assert contents(folder) == contents(full(directory))
    assert bring(folder, **by(tp=size)).received == (0,) * size
    assert contents(folder) == contents(full(directory))


def in_the_cache_of_the_hub(directory: str) -> None:
    with patch.dict(os.environ, HF_HUB_CACHE=str(Path(directory, f"rank{rank}"))):
        place_here = HubCache("org/model")
        if rank == 0:
            made = make(Path(directory, "made"))
            commit = "0123456789abcdef" * 2 + "01234567"
            shutil.copytree(made, place_here.root / "snapshots" / commit)
            (place_here.root / "refs").mkdir()
            (place_here.root / "refs" / "main").write_text(commit)
        group.barrier()
        bring(place_here, **by(tp=size))
        model, _ = load_sharded("org/model", tp=size)
        whole, _ = load_sharded(Path(directory, "made"), tp=size)
        assert all(mx.array_equal(parameters(whole)[name], array) for name, array in parameters(model).items())
        if rank:
            refusal("type: mlxdist pull org/model,", load_sharded, "org/model", group=group.split(1))
        else:
            group.split(0)
        bring(place_here)
        assert not (find_model("org/model") / ".mlxdist-shards").exists()
        Checkpoint(find_model("org/model"))


def computed(directory: str) -> None:
    """mlx-lm computes parameters of this model from several tensors, which ranks read in full."""
    folder = own(directory)
    if rank == 0:
        make(folder, MIXTURE, bits=None)
        stacked = {}
        for path in sorted(folder.glob("*.safetensors")):
            stacked |= mx.load(str(path))
            path.unlink()
        (folder / "model.safetensors.index.json").unlink()
        weights = {}
        for name, array in stacked.items():
            if "switch_mlp" in name:
                for number in range(len(array)):
                    weights[name.replace("switch_mlp", f"experts.{number}")] = array[number]
            else:
                weights[name] = array
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    group.barrier()
    refusal("mlx-lm computes model.layers.0.mlp.switch_mlp", bring, folder, **by(tp=size))
    assert rank == 0 or not folder.exists()


def full_disk(directory: str) -> None:
    """Only what is needed counts."""
    folder = start(directory)
    done: list[int] = []

    def room(path: Path, wanted: int, what: str) -> None:
        done.append(wanted)
        raise ResourceError("nothing was written") if rank else InvalidArgument("unused")

    with patch("mlxdist.tools.models.spread.require_room", room):
        refusal("nothing was written" if rank else "unused", bring, folder, kinds=Error, **by(tp=size))
    received = bring(folder, **by(tp=size)).received
    assert done == [received[rank]], (done, received)


run_scenario(globals())
