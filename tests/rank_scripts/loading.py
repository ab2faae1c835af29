"""One rank of test_loading.py: models without adapters. Arguments: scenarios, and a directory for files.

Prints "right" after each scenario. Rank 0 saves tiny models as mlx-lm does. Every rank creates the same ones and
compares them with what it has loaded.
"""

import dataclasses
import json
import math
import os
import shutil
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes, load_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import mlxdist
from mlxdist.nn.models.load import LoadReport, load_sharded, streaming
from mlxdist.nn.models.plan import Plan, plan_shards
from mlxdist.nn.models.verify import verify

group = mlxdist.init()
rank, size = group.rank(), group.size()
base = Path(sys.argv[2])

HEADS = math.lcm(4, size)  # that the ranks can share
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 32 * HEADS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": size,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 96,
    "hidden_size": 32 * HEADS,
    "num_hidden_layers": 1,
    "intermediate_size": 32 * size,
    "num_attention_heads": HEADS,
    "num_key_value_heads": size,
    "num_local_experts": 2 * size,
    "num_experts_per_tok": 2,
}


def load_with_report(path: Path | str, **options: object) -> tuple[nn.Module, object, LoadReport]:
    reports: list[LoadReport] = []
    return *load_sharded(path, on_report=reports.append, **options), *reports


def make(config: dict, dtype: mx.Dtype = mx.float32, bits: int | None = None) -> tuple[nn.Module, dict]:
    """A model with random weights, the same on every rank, and its configuration."""
    mx.random.seed(0)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    model.update(tree_map(lambda x: (x * 3).astype(dtype), model.parameters()))  # so that logits depend on the prompt
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config = config | {"quantization": {"group_size": 32, "bits": bits}}
    mx.eval(model.parameters())
    return model, config


def save(name: str, model: nn.Module, config: dict, files: int = 1) -> Path:
    """Saves as mlx-lm does, on rank 0, in about as many files."""
    directory = base / name
    group.barrier()  # what was saved there before is in no rank's use any more
    if rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        save_weights(directory, dict(tree_flatten(model.parameters())), files)
        (directory / "config.json").write_text(json.dumps(config))
    group.barrier()
    return directory


def save_weights(directory: Path, weights: dict[str, mx.array], files: int) -> None:
    parts = np.array_split(list(weights), files)
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" if files > 1 else "model.safetensors" for i in range(files)]
    for file, part in zip(names, parts):
        mx.save_safetensors(str(directory / file), {name: weights[name] for name in part}, metadata={"format": "mlx"})
    index = {str(name): file for file, part in zip(names, parts) for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def save_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(directory)


def expect(error: type[Exception], words: list[str], function, *arguments, **keywords) -> None:
    """The same error on every rank, which all can go on after."""
    try:
        function(*arguments, **keywords)
    except error as caught:
        assert all(word in str(caught) for word in words), f"{words} not in {caught}"
    else:
        raise AssertionError(f"no {error.__name__} with {words}")
    assert mlxdist.all_sum(np.ones(1))[0] == size


def require_parts(model: nn.Module, whole: nn.Module, plan: Plan) -> None:
    """Every parameter is bitwise this rank's shard of the full one."""
    expected = dict(tree_flatten(whole.parameters()))
    for path, array in tree_flatten(model.parameters()):
        part = plan.shards[path].take(expected[path], rank)
        assert array.dtype == part.dtype and mx.array_equal(array, part, equal_nan=True), path


def models() -> None:
    """Each kind of model from local files and streamed: the shards, and the logits of all the ranks together."""
    for name, config, dtype, bits, files in [
        ("float32", QWEN3, mx.float32, None, 1),
        ("tied", QWEN3 | {"tie_word_embeddings": True}, mx.float32, None, 3),
        ("bfloat16", QWEN3, mx.bfloat16, None, 2),
        ("float16", QWEN3, mx.float16, None, 1),
        ("4 bits", QWEN3, mx.float32, 4, 3),
        ("4 bits, bfloat16", QWEN3, mx.bfloat16, 4, 1),
        ("mixtral", MIXTRAL, mx.float32, None, 2),
        ("mixtral, 4 bits", MIXTRAL, mx.float32, 4, 1),
    ]:
        whole, config = make(config, dtype, bits)
        directory = save(name, whole, config, files)
        if name == "tied" and rank == 0:
            save_tokenizer(directory)
        group.barrier()
        for streamed in (False, True):
            here = directory if rank == 0 or not streamed else None
            model, tokenizer, report = load_with_report(here, stream=streamed)
            assert tokenizer.encode("b a b") == [1, 0, 1] if name == "tied" else tokenizer is None
            assert report.computed == []
            require_parts(model, whole, report.plan)
            verification = verify(model, whole)
            assert verification.agrees and verification.positions == 16, f"{name}: {verification}"
    print("right")


def sizes() -> None:
    """Bytes read and memory are about 1 / ranks of a model that is nearly all sharded; rank 0 prints its progress."""
    vars(sys.modules[load_sharded.__module__])["LINE_SECONDS"] = 0
    config = QWEN3 | {"hidden_size": 256, "intermediate_size": 96 * HEADS, "num_hidden_layers": 4, "vocab_size": 32}
    whole, config = make(config)
    total = sum(array.nbytes for _, array in tree_flatten(whole.parameters()))
    directory = save("sizes", whole, config, 3)
    del whole
    for streamed in (False, True):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        model, _, report = load_with_report(directory, stream=streamed)
        peak = mx.get_peak_memory() - before
        largest = max(shard.bytes(rank) for shard in report.plan.shards.values())
        held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        assert report.bytes_total == total and report.bytes_held == held == report.plan.bytes(rank)
        assert held < 1.05 * total / size, f"{held} of {total}"
        assert peak < held + 2 * largest, f"{peak} at most, {held} in the end"
        sent = total if rank == 0 else 0  # each shard is read once, however many ranks hold it
        samples = 1024 * len(report.plan.shards)
        assert sent <= report.bytes_read <= sent if streamed else held <= report.bytes_read <= held + samples
        del model
    print("right")


def refused() -> None:
    """Whatever is wrong on one rank is the same error on all, and the group works on."""
    last = size - 1
    whole, config = make(QWEN3)
    weights = dict(tree_flatten(whole.parameters()))
    good = save("good", whole, config, 2)

    def case(words: list[str], change=lambda directory: None, on: int = last, **keywords) -> None:
        """Rank ``on`` has a changed copy of the directory, the others the good one."""
        directory = good
        if rank == on:
            directory = base / "bad"
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(good, directory)
            change(directory)
        expect(mlxdist.InvalidArgument, words, load_sharded, directory, **keywords)

    def changed(function):
        def change(directory: Path) -> None:
            mine = dict(weights)
            function(mine)
            save_weights(directory, mine, 2)

        return change

    def replaced(name: str, array: mx.array):
        return changed(lambda mine: mine.update({name: array}))

    second = "model-00002-of-00002.safetensors"
    case(["config.json", "give the directory of a model"], lambda directory: (directory / "config.json").unlink())
    case([second, "is missing"], lambda directory: (directory / second).unlink())
    case([second, "is damaged"], lambda directory: os.truncate(directory / second, 5000))
    case(["mlx-lm cannot build", "9"], lambda directory: edit(directory, hidden_size=9), on=0) if size == 1 else None
    if size > 1:
        case(["config.json of rank", "not that of rank 0"], lambda directory: edit(directory, rope_theta=9.0))
        case(["model-0000", "of rank", "not that of rank 0"], changed(lambda mine: mine.pop("lm_head.weight")))
        norm = "model.norm.weight"
        case(["different weights", f"{norm} ({norm} in", f"rank {last}"], replaced(norm, weights[norm] * 2))
        cut = "model.layers.1.mlp.down_proj.weight"
        case(["different weights", f"{cut} ({cut} in", f"rank {last}"], replaced(cut, weights[cut] + 1e-3))
        arguments = ["load_sharded", "arguments", f"on rank {last}"]
        expect(mlxdist.Mismatch, arguments, load_sharded, good, verify=rank == last)
    # The same on all ranks, where only mlx-lm can tell.
    embedding = "model.embed_tokens.weight"
    integers = {embedding: weights[embedding].view(mx.int32)}
    for words, directory in [
        (["missing", "lm_head.weight"], with_weights("missing", config, weights, remove="lm_head.weight")),
        (["lm_head.weight", "shape"], with_weights("shape", config, weights, **{"lm_head.weight": mx.ones((96, 63))})),
        (["not in model", "more.weight"], with_weights("more", config, weights, **{"more.weight": mx.ones((2,))})),
        (["model.embed_tokens.weight", "int32", "floats"], with_weights("integers", config, weights, **integers)),
        (["nothing of the kind"], with_weights("type", config | {"model_type": "nothing of the kind"}, weights)),
    ]:
        expect(mlxdist.InvalidArgument, words, load_sharded, directory)
        expect(mlxdist.InvalidArgument, words, load_sharded, directory if rank == 0 else None, stream=True)
    expect(mlxdist.InvalidArgument, ["must be the directory or the name"], load_sharded, None)
    expect(mlxdist.InvalidArgument, ["org/none", "mlxdist pull org/none"], load_sharded, "org/none")
    expect(mlxdist.InvalidArgument, ["tp=5 times ep=1"], load_sharded, good, tp=5)
    expect(mlxdist.InvalidArgument, ["tp and ep must be positive"], load_sharded, good, ep=0)
    plan = plan_shards(whole, size)
    more = plan_shards(whole, size + 1) if size == 1 else dataclasses.replace(plan, tp=size + 1)
    expect(mlxdist.InvalidArgument, ["plan is for", "ranks"], load_sharded, good, plan=more)
    other, _ = make(QWEN3 | {"vocab_size": 32})
    expect(mlxdist.InvalidArgument, ["another model"], load_sharded, good, plan=plan_shards(other, size))
    expect(mlxdist.InvalidArgument, ["plan must be a Plan, not"], load_sharded, good, plan=7 if rank == last else plan)
    wrong = {"stage_plan": "equal"} if rank == last else {"plan": plan}
    expect(mlxdist.InvalidArgument, ["stage_plan must be a StagePlan, not str"], load_sharded, good, **wrong)
    print("right")


def edit(directory: Path, **values: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | values))


def with_weights(name: str, config: dict, weights: dict, remove: str = "", **more: mx.array) -> Path:
    directory = base / name
    group.barrier()  # what was saved there before is in no rank's use any more
    if rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        save_weights(directory, {key: array for key, array in (weights | more).items() if key != remove}, 1)
        (directory / "config.json").write_text(json.dumps(config))
    group.barrier()
    return directory


def failing_stream() -> None:
    """Rank 0 cannot read in the middle, or a byte changes on its way: the same error on every rank."""
    whole, config = make(QWEN3)
    directory = save("stream", whole, config, 2)
    preadv, calls = os.preadv, 0

    def broken(*arguments) -> int:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise OSError(5, "Input/output error")
        return preadv(*arguments)

    os.preadv = broken
    expect(mlxdist.InvalidArgument, ["cannot be read", "Input/output error"], load_sharded, directory, stream=True)
    os.preadv = preadv
    if size > 1:
        receive = streaming._receive
        streaming._receive = lambda memory, *rest: receive(memory, *rest) ^ (rank == size - 1)
        words = ["arrived damaged", f"rank {size - 1}" if size == 2 else "rank", "CRC-32"]
        expect(mlxdist.TransportError, words, load_sharded, directory, stream=True)
        streaming._receive = receive
    model, _ = load_sharded(directory if rank == 0 else None, stream=True)
    assert verify(model, whole).agrees
    print("right")


def computed() -> None:
    """Experts as Hugging Face has them, which mlx-lm stacks: read whole, and the result is the same."""
    whole, config = make(MIXTRAL)
    weights = dict(tree_flatten(whole.parameters()))
    for name in [name for name in weights if ".switch_mlp." in name]:
        experts = weights.pop(name)
        for old, new in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            if old in name:
                for i, expert in enumerate(experts):
                    weights[name.replace(f"switch_mlp.{old}", f"experts.{i}.{new}")] = expert
    directory = with_weights("computed", config, weights)
    for streamed in (False, True):
        model, _, report = load_with_report(directory, stream=streamed)
        assert len(report.computed) == 3, report.computed
        require_parts(model, whole, report.plan)
        assert verify(model, whole).agrees
    print("right")


def plans() -> None:
    """Shards of different sizes, and a plan that was kept as JSON."""
    whole, config = make(QWEN3 | {"num_attention_heads": 2 * size + 2, "num_key_value_heads": size + 1,
                                  "intermediate_size": 32 * (size + 1)})  # fmt: skip
    directory = save("plans", whole, config)
    plan = plan_shards(whole, size, rank_shares=[2] + [1] * (size - 1)) if size > 1 else plan_shards(whole)
    model, _ = load_sharded(directory, plan=Plan.from_json(plan.to_json()), verify=True)
    require_parts(model, whole, plan)
    print("right")


def named() -> None:
    """By the name under which the local cache of the Hugging Face Hub has a model, also streamed and verified."""
    whole, config = make(QWEN3)
    directory = save("hub/models--org--named/snapshots/0123", whole, config)
    refs = directory.parents[1] / "refs"
    if rank == 0:
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text(directory.name)
    group.barrier()
    os.environ["HF_HUB_CACHE"] = str(base / "hub")
    for streamed in (False, True):
        model, _, report = load_with_report("org/named", stream=streamed, verify=True)
        require_parts(model, whole, report.plan)
    expect(mlxdist.InvalidArgument, ["org/none", "mlxdist pull org/none"], verify, model, "org/none")
    print("right")


def experts() -> None:
    """Whole experts on their ranks: alone, and in a grid with tensor-parallel ranks."""
    for bits in (None, 4):
        whole, config = make(MIXTRAL, bits=bits)
        directory = save("experts", whole, config)
        for ep in sorted({size, max(size // 2, 1)}):
            for streamed in (False, True):
                model, _, report = load_with_report(directory, ep=ep, stream=streamed, verify=True)
                assert report.plan.ep == ep and report.plan.ranks == size
                kinds = {shard.kind for shard in report.plan.shards.values()}
                assert "experts" in kinds or ep == 1
    print("right")


def verification() -> None:
    """Another weight on one rank is noticed on all, and said."""
    whole, config = make(QWEN3)
    directory = save("verification", whole, config)
    model, _ = load_sharded(directory, verify=True)
    right = verify(model, directory, mx.arange(20))
    assert right.agrees and right.positions == 20 and "logits of the sharded and the full model agree" in str(right)
    assert not verify(model, directory, tolerance=1e-12).agrees or size == 1
    if rank == size - 1:
        layer = model.layers[1].mlp.down_proj
        layer.weight = layer.weight * 1.01
    wrong = verify(model, whole if rank == 0 else None)
    assert not wrong.agrees and "DO NOT AGREE on rank" in str(wrong), wrong
    if rank == size - 1:
        layer.weight = layer.weight * math.nan
    assert not verify(model, whole).agrees
    expect(mlxdist.InvalidArgument, ["reference must be"], verify, model, None)
    expect(mlxdist.InvalidArgument, ["tokens must be at least 5"], verify, model, whole, mx.array([1, 2]))
    expect(mlxdist.InvalidArgument, ["from 0 to 95"], verify, model, whole, mx.array([96] * 8))
    print("right")


def model_files() -> None:
    """Tiny models of every file of mlx-lm, saved and loaded."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    import tiny_models

    wrong, unusable = [], []
    for name in sorted(set(tiny_models.model_files()) - set(tiny_models.NOT_IMPORTED)):
        directory = save("file", tiny_models.build(name), tiny_models.config_of(name) | {"model_type": name})
        try:
            expected, _ = load_model(directory)
        except ValueError:
            unusable.append(name)
            continue
        try:
            model, _, report = load_with_report(directory)
            require_parts(model, expected, report.plan)
        except (AssertionError, mlxdist.InvalidArgument) as error:
            wrong.append(f"{name}: {error}")
    assert unusable == ["prism_hadamard_qwen35"], unusable  # its signs must be 1 and -1
    assert not wrong, "\n".join(wrong)
    print("right")


if __name__ == "__main__":
    for scenario in sys.argv[1].split(","):
        globals()[scenario]()
