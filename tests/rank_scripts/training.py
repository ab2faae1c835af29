"""One rank of test_training.py. Arguments: the scenario and its arguments."""

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from scenarios import group, run_scenario

import mlxdist
from mlxdist.nn.models.cuts import cuts
from mlxdist.nn.models.plan import Plan, plan_shards, shard_model
from mlxdist.nn.models.plan.shard_model import why_not_trained
from mlxdist.nn.tensor_parallel.lora import ShardedLinear

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

TOKENS = [[5, 17, 3, 60, 21, 9, 44, 11, 80], [2, 33, 71, 8, 50, 64, 1, 19, 27]]
# Of the largest gradient of a parameter; float32 sums over the ranks come in another order.
TOLERANCE = 5e-4
STEPS = 20
SHOWN = 6


def loss(model: nn.Module, tokens: mx.array) -> mx.array:
    logits = model(tokens[:, :-1]).astype(mx.float32)
    # Some models forbid tokens with -inf.
    return nn.losses.cross_entropy(mx.maximum(logits, -1e9), tokens[:, 1:]).mean()


def gradients(model: nn.Module) -> dict[str, mx.array]:
    value, found = nn.value_and_grad(model, loss)(model, mx.array(TOKENS))
    mx.eval(value, found)
    return {"the loss": value, **dict(tree_flatten(found))}


def differences(found: dict, expected: dict, plan: Plan) -> Iterator[str]:
    """What is not this rank's shard of what one process has."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    # Gradients that are zero on paper, such as of a bias of keys, are noise.
    largest = max(float(mx.abs(whole).max()) for whole in expected.values())
    for path, whole in expected.items():
        shard = plan.shards.get(path)
        mine = np.array(shard.take(whole, group.rank()) if shard else whole).ravel()
        size = max(float(mx.abs(whole).max()), 1e-3 * largest)
        error = float(np.abs(np.array(found[path]).ravel() - mine).max(initial=0)) / size
        if not error <= TOLERANCE:
            yield f"{path} by {error:.2g}"


def compare(name: str, fields: dict | None = None, steps: int = 0, quantized: bool = False, **how: object) -> str:
    """The gradients of a sharded model, or its parameters after steps, and those of the full one: "" if they are
    close."""
    whole, model = (tiny_models.build(name, **(fields or {})) for _ in range(2))
    for one in (whole, model) if quantized else ():
        nn.quantize(one, group_size=32, bits=4)  # its norms are trained
    plan = plan_shards(model, **({"tp": group.size()} | how))
    refused = why_not_trained(model, plan)
    shard_model(model, plan, group=group)
    if refused:
        return "" if refusal(model) == refused else f"{name}: a gradient is not rejected"
    found, expected = (trained(one, steps) if steps else gradients(one) for one in (model, whole))
    wrong = list(differences(found, expected, plan))
    some = ", ".join(wrong[:SHOWN])
    return f"{name} by {plan.how}: {len(wrong)} of {len(expected)} differ: {some}" if wrong else ""


def refusal(model: nn.Module) -> str:
    """Why a gradient is rejected, where the model still computes."""
    assert mx.isfinite(loss(model, mx.array(TOKENS))).item()
    try:
        gradients(model)
    except mlxdist.InvalidArgument as error:
        return str(error).partition("which is sharded: ")[2]
    return ""


def trained(model: nn.Module, steps: int) -> dict[str, mx.array]:
    # A gradient that is zero on paper is not noise of full speed with this eps.
    optimizer = optim.AdamW(learning_rate=1e-3, eps=1e-5)
    step = nn.value_and_grad(model, loss)
    for _ in range(steps):
        _, found = step(model, mx.array(TOKENS))
        optimizer.update(model, found)
        mx.eval(model.parameters(), optimizer.state)
    return dict(tree_flatten(model.parameters()))


def close(*cases: tuple[str, dict]) -> None:
    wrong = [f"{how}: {message}" for name, how in cases if (message := compare(name, **how))]
    assert not wrong, "; ".join(wrong)


def models(heads: str, *names: str) -> None:
    """One process for all. `heads` are those of the models, "6:3", if not their own."""
    close(*((name, {"fields": fields_of(heads)}) for name in names))


def fields_of(heads: str) -> dict[str, tuple[int, ...]]:
    return {"heads": tuple(map(int, heads.split(":")))} if heads else {}


def steps(*names: str) -> None:
    close(*((name, {"steps": STEPS}) for name in names))


def cases() -> None:
    """Uneven weights, whole experts, adapters on layers that are full."""
    heads = {"fields": {"heads": (6, 3)}, "rank_shares": [2, 1]}
    close(("qwen3", heads), ("qwen2_moe", heads), ("gpt_oss", heads), ("minimax", heads), ("kimi_k3", heads))
    close(("iquestloopcoder", heads))
    close(
        ("longcat_flash", {"rank_shares": [1, 1]}), ("qwen3_moe", {"tp": 1, "ep": 2}), ("mixtral", {"tp": 1, "ep": 2})
    )
    close(("qwen3", {"quantized": True}), ("mixtral", {"quantized": True}))
    latent = tiny_models.config_of("kimi_k3")["text_config"] | {"routed_expert_hidden_size": 32}
    close(("kimi_k3", {"fields": {"text_config": latent | {"latent_moe_use_norm": True}}}))
    whole, model = tiny_models.build("deepseek_v3"), tiny_models.build("deepseek_v3")
    plan = plan_shards(model, tp=group.size())
    shard_model(model, plan, group=group)
    for one in (whole, model):
        adapt(one)
    wrong = list(differences(gradients(model), gradients(whole), plan))
    assert not wrong, wrong


def transformed() -> None:
    """The same inside mx.compile, and with mlx-lm's checkpoints, which compute a layer again in the backward pass."""
    whole, model = tiny_models.build("qwen3_moe"), tiny_models.build("qwen3_moe")
    plan = plan_shards(model, tp=group.size())
    shard_model(model, plan, group=group)
    expected = gradients(whole)
    step = nn.value_and_grad(model, loss)
    compiled = mx.compile(lambda tokens: step(model, tokens), inputs=model.state, outputs=model.state)
    for how in ("compiled", "again", "with checkpoints"):
        if how == "with checkpoints":
            tiny_models.checkpoint_layers(model)
        value, found = (step if how == "with checkpoints" else lambda _, tokens: compiled(tokens))(
            model, mx.array(TOKENS)
        )
        wrong = list(differences({"the loss": value, **dict(tree_flatten(found))}, expected, plan))
        assert not wrong, (how, wrong)


def adapt(model: nn.Module) -> None:
    """LoRA on latent projections, which all ranks hold, and which see one rank's share of the gradients."""
    model.freeze()
    mx.random.seed(3)
    keys = {"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"}
    linear_to_lora_layers(model, 4, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys})
    noise = {path: mx.random.normal(array.shape) for path, array in tree_flatten(model.trainable_parameters())}
    assert len(noise) == 16
    model.update(tree_unflatten(list(noise.items())))


def parallel_regions() -> None:
    """What does not belong to one model: adapters, refusals, threads, what a token costs, what is kept and saved."""
    adapters("", "mixtral", "gemma4_text", "gpt_oss", "llama")
    wrong = list(adapted("phi3", {"num_key_value_heads": 1}, quantized=True))
    assert not wrong, "; ".join(wrong)
    adapters_come_after_the_cut()
    other_adapters_are_refused()
    refused_inside()
    two_threads()
    work_without_gradients()
    saved_and_freed()


def cut(name: str) -> nn.Module:
    model = tiny_models.build(name)
    return shard_model(model, plan_shards(model, tp=group.size()), group=group)


def adapted(name: str, fields: dict | None = None, quantized: bool = False, **how: object) -> Iterator[str]:
    """mlx-lm's adapters on all that it takes by default: the same layers, sharded or not, also experts."""
    config = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    whole, model = (tiny_models.build(name, **(fields or {})) for _ in range(2))
    for one in (whole, model) if quantized else ():
        nn.quantize(one, group_size=32, bits=4)
    plan = plan_shards(model, **({"tp": group.size()} | how))
    shard_model(model, plan, group=group)
    for one in (whole, model):
        one.freeze()
        linear_to_lora_layers(one, 4, config)
    mine = dict(tree_flatten(model.trainable_parameters()))
    mx.random.seed(7)
    values = {path: 0.1 * mx.random.normal(a.shape) for path, a in tree_flatten(whole.trainable_parameters())}
    assert values.keys() == mine.keys(), (name, values.keys() ^ mine.keys())
    whole.update(tree_unflatten(list(values.items())))
    model.update(tree_unflatten([(path, part_of_adapter(path, values[path], plan)) for path in mine]))
    found, expected = gradients(model), gradients(whole)
    largest = max(float(mx.abs(array).max()) for array in expected.values())
    for path, array in found.items():
        wanted = part_of_adapter(path, expected[path], plan)
        size = max(float(mx.abs(wanted).max()), 1e-3 * largest)
        error = float(mx.abs(array - wanted).max()) / size
        if not error <= TOLERANCE:
            yield f"{name}, adapter {path} by {error:.2g}"


def adapters(heads: str, *names: str) -> None:
    wrong = [message for name in names for message in adapted(name, fields_of(heads))]
    assert not wrong, "; ".join(wrong)


def adapters_come_after_the_cut() -> None:
    """As a whole again, saved and fused they are those of the full layer."""
    new_adapters_are_parts_of_whole_ones()
    model = cut("smollm3")
    model.freeze()
    mx.random.seed(5)
    linear_to_lora_layers(model, 1, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    attention = model.layers[-1].self_attn
    x = mx.random.normal((1, 3, 64))
    for adapter in (attention.k_proj, attention.o_proj):
        a, b = mx.random.normal((64, 4)), mx.random.normal((4, adapter.linear.output_dims))
        joined = adapter.load_adapter(a, b).join_adapter()
        assert mx.array_equal(joined["lora_a"], a) and mx.array_equal(joined["lora_b"], b)
    before = attention(x)
    for name in ("k_proj", "o_proj"):
        attention[name] = attention[name].fuse()
    assert mx.allclose(attention(x), before, atol=1e-4).item()
    for name in ("phi3", "llama", "mixtral"):
        model = tiny_models.build(name)
        plan = plan_shards(model, tp=group.size())
        use_dora = name == "llama"
        linear_to_lora_layers(model, 1, {"rank": 4, "scale": 2.0, "dropout": 0.0}, use_dora)
        for attempt in (lambda: plan_shards(model, tp=group.size()), lambda: shard_model(model, plan, group=group)):
            try:
                attempt()
                raise AssertionError("not rejected")
            except mlxdist.InvalidArgument as error:
                assert "shard the model first, then put adapters on it" in str(error), error


def new_adapters_are_parts_of_whole_ones() -> None:
    """Also those of mlx-lm itself, on experts and shared experts, whose results a block sums up."""
    for name in ("mixtral", "qwen2_moe"):
        whole, model = tiny_models.build(name), tiny_models.build(name)
        plan = plan_shards(model, tp=group.size())
        shard_model(model, plan, group=group)
        layers, compared = dict(whole.named_modules()), set()
        for path, layer in model.named_modules():
            if isinstance(layer, ShardedLinear) or not hasattr(layer, "to_lora"):
                continue
            kind = LoRASwitchLinear if isinstance(layer, SwitchLinear) else LoRALinear
            mx.random.seed(8)
            mine = layer.to_lora(r=4)
            mx.random.seed(8)
            expected = kind.from_base(layers[path], r=4)
            for matrix in ("lora_a", "lora_b"):
                part = part_of_adapter(f"{path}.{matrix}", expected[matrix], plan)
                assert mx.array_equal(mine[matrix], part), (name, path, matrix)
            compared.add(kind)
        assert compared == ({LoRASwitchLinear} if name == "mixtral" else {LoRALinear, LoRASwitchLinear}), compared


def part_of_adapter(path: str, whole: mx.array, plan: Plan) -> mx.array:
    """This rank's shard: a matrix is sharded where it meets what the weight of its layer is sharded along."""
    layer, _, name = path.rpartition(".")
    weight = plan.shards.get(f"{layer}.weight")
    if weight is None or not weight.ranges:
        return whole
    meets = {-2: "lora_b", -1: "lora_a"}[weight.axis - len(weight.shape)]
    axis = 0 if len(weight.shape) == 2 and name == "lora_a" else 2 if name == "lora_a" else 1
    if name != meets:
        return whole
    length, held = whole.shape[axis], weight.shape[weight.axis]
    pieces = [np.arange(start * length // held, stop * length // held) for start, stop in weight.ranges[group.rank()]]
    return mx.take(whole, mx.array(np.concatenate(pieces)), axis)


def other_adapters_are_refused() -> None:
    """DoRA, which has a norm over all inputs, of which a rank has a shard; mlx-lm's own LoRA, put on by hand."""
    config = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    for name in ("llama", "mixtral"):  # before a layer is changed
        model = cut(name)
        before = [path for path, _ in tree_flatten(model.parameters())]
        try:
            linear_to_lora_layers(model, 4, config, use_dora=True)
            raise AssertionError("not rejected")
        except ValueError:
            assert [path for path, _ in tree_flatten(model.parameters())] == before
    model = cut("qwen2_moe")
    model.freeze()
    linear_to_lora_layers(model, 4, config | {"keys": {"mlp.shared_expert.down_proj"}}, use_dora=True)
    refuses_gradients(model, "how DoRALinear, put on the sharded shared_expert.down_proj, trains is not known")
    for kind in (LoRALinear, DoRALinear):
        model = cut("llama")
        attention = model.layers[-1].self_attn
        attention.o_proj = kind.from_base(attention.o_proj)
        refuses_gradients(model, f"how {kind.__name__}, put on the sharded o_proj, trains is not known")


def refuses_gradients(model: nn.Module, words: str) -> None:
    try:
        gradients(model)
        raise AssertionError("not rejected")
    except mlxdist.InvalidArgument as error:
        assert words in str(error), error


def refused_inside() -> None:
    """Also where the loss is of an inner model."""
    model, tokens = cut("longcat_flash"), mx.array(TOKENS)
    assert mx.isfinite(model.model(tokens).sum()).item()
    try:
        mx.eval(nn.value_and_grad(model, lambda model, tokens: model.model(tokens).square().mean())(model, tokens))
        raise AssertionError("not rejected")
    except mlxdist.InvalidArgument as error:
        assert "which is sharded: its zero experts" in str(error), error


class Meeting(nn.Module):
    """A router: the first thread in it waits for the second, if that comes, and the second until the first is done."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router
        self._first, self._second, self._done = (threading.Event() for _ in range(3))

    def __call__(self, x: mx.array) -> mx.array:
        if not self._first.is_set():
            self._first.set()
            self._second.wait(0.5)
        else:
            self._second.set()
            self._done.wait(5)
        return self.router(x)


def two_threads() -> None:
    """In one block at a time: afterwards its parameters are its own."""
    block = cut("gpt_oss").layers[0].mlp
    block.router = meeting = Meeting(block.router)
    before, x = dict(tree_flatten(block.parameters())), mx.ones((1, 2, block.router.router.weight.shape[-1]))

    def first() -> None:
        block(x)
        meeting._done.set()

    threads = [threading.Thread(target=first), threading.Thread(target=lambda: block(x))]
    threads[0].start()
    assert meeting._first.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert meeting._second.is_set()
    after = dict(tree_flatten(block.parameters()))
    assert [path for path in before if after[path] is not before[path]] == []


def work_without_gradients() -> None:
    """How many functions a block calls for its parallel region where nothing is differentiated: two, but for scaled
    biases."""
    for name, bound in (("llama", 3), ("qwen3", 3), ("deepseek_v3", 3), ("gpt_oss", 20)):
        model, token = cut(name), mx.array([[5]])
        model(token)
        calls: Counter = Counter()

        def count(frame: FrameType, event: str, argument: object, calls: Counter = calls) -> None:
            file, function = Path(frame.f_code.co_filename).name, frame.f_code.co_name
            if event in ("call", "c_call") and file in ("parallel_region.py", "mappings.py"):
                calls[function if event == "call" else argument.__name__] += 1

        sys.setprofile(count)
        try:
            model(token)
        finally:
            sys.setprofile(None)
        blocks = sum("_region" in vars(module) and callable(module) for module in model.modules())
        inner = sum(type(module).__name__.startswith("_Inner") for module in model.modules())
        assert blocks >= tiny_models.LAYERS and calls["custom_function"] == 0
        # A column-parallel layer asks whether anything is traced, and calls nn.Linear.
        assert calls.total() <= bound * blocks + 2 * inner, (name, blocks, inner, calls)


def saved_and_freed() -> None:
    """Adapters on full layers of a sharded block are full; those on sharded layers are not. What is replaced is not
    kept."""
    model = cut("deepseek_v3")
    adapt(model)
    found = cuts(model)
    assert all(found[path].is_full for path, _ in tree_flatten(model.trainable_parameters()))
    attention = "model.layers.0.self_attn"
    assert not any(found[f"{attention}.{name}.weight"].is_full for name in ("o_proj", "q_b_proj"))
    model = cut("mixtral")
    linear_to_lora_layers(model, 1, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    found, experts = cuts(model), f"model.layers.{len(model.layers) - 1}.block_sparse_moe.switch_mlp"
    assert all(found[f"{experts}.{name}"].is_full for name in ("gate_proj.lora_a", "down_proj.lora_b"))
    for name in ("gate_proj.lora_b", "down_proj.lora_a", "down_proj.linear.weight"):
        assert not found[f"{experts}.{name}"].is_full
    # KV heads fewer than the ranks: mlx-lm's shard() makes a sharded layer of what all ranks hold.
    model = tiny_models.build("qwen3_5", heads=(4, 1))
    shard_model(model, plan_shards(model, tp=group.size()), group=group)
    linear_to_lora_layers(model, 1, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    found, attention = cuts(model), f"language_model.model.layers.{len(model.layers) - 1}.self_attn"
    assert all(found[f"{attention}.k_proj.{name}"].is_full for name in ("linear.weight", "lora_a", "lora_b"))
    assert not found[f"{attention}.q_proj.lora_b"].is_full
    model = cut("mixtral")
    replaced = ref(model.layers[0].block_sparse_moe.gate)
    nn.quantize(model, 32, 4, class_predicate=lambda path, module: path.endswith("block_sparse_moe.gate"))
    gc.collect()
    assert replaced() is None


def collectives() -> None:
    """One a block in the forward pass, and one for the tokens; in the backward pass one for its input and one for what
    is full in it."""
    for name, sums, router in (("qwen3_moe", (1 + 8, 8 + 4 + 3), 1), ("smollm3", (1 + 8, 8), 0)):
        model = tiny_models.build(name)
        shard_model(model, plan_shards(model, tp=group.size()), group=group)
        forward = counted(lambda model=model: loss(model, mx.array(TOKENS)))
        backward = counted(lambda model=model: gradients(model)) - forward
        assert (forward, backward) == sums, f"{name}: {forward}, {backward}"
        # What is frozen costs nothing: of the last MLP only its router is left.
        model.freeze()
        model.layers[-1].mlp.unfreeze()
        backward = counted(lambda model=model: gradients(model)) - forward
        assert backward == router, f"{name}, frozen: {backward}"


def counted(step: Callable[[], object]) -> int:
    before = group.stats()["collectives"]
    mx.eval(step())
    return group.stats()["collectives"] - before


run_scenario(globals())
