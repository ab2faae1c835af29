"""`--kv-bits`: the tokens of mlx-lm with its own quantized KV caches, which serve one request at a time."""

import random

import mlx.core as mx
import overlapping
import pytest
import tiny_models
from mlx_lm import load
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model
from serving import ServerProcess, require_answers, save_adapters, save_model_folder

from mlxdist import InvalidArgument
from mlxdist.serve.memory import cache_sizes
from mlxdist.serve.quantized_cache import QuantizedKVCache, quantize_caches
from mlxdist.serve.worker import BatchLimits, Worker

GROUP, BITS = 32, 4
OPTIONS = ("--kv-bits", BITS, "--kv-group-size", GROUP)
WIDER = (
    "d_model",
    "head_dim",
    "hidden_dim",
    "hidden_size",
    "n_embd",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
REFUSED = {
    "deepseek_v3": "with quantized KV caches (--kv-bits): 'tuple' object has no attribute",
    "gpt_oss": "with quantized KV caches (--kv-bits): Quantized SDPA does not support attention sinks",
    "falcon_h1": "serve: the model has no KV caches that --kv-bits could quantize",
}
CANNOT_BE_WIDE = ("lfm2", "lfm2-vl", "qwen")  # other sizes of theirs follow from these


def quantized(model, bits=BITS):
    """What mlx-lm's make_prompt_cache makes, with its own quantized caches."""
    return [
        mlx_lm_cache.QuantizedKVCache(GROUP, bits) if type(each) is KVCache else each
        for each in make_prompt_cache(model)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny", head_dim=32)


@pytest.fixture(scope="module")
def loaded(folder):
    return load(str(folder))


@pytest.mark.parametrize("keys, values, rows", [(32, 32, 1), (64, 32, 3)])
def test_a_batch_has_the_arrays_of_its_requests(keys, values, rows):
    """Requests of unequal lengths are joined, grow, are left out, and come out again: the arrays of each alone."""
    mx.random.seed(rows)
    lengths, more = random.Random(rows).sample(range(1, 300), rows), 5
    tokens = [[mx.random.normal((1, 2, length + more, size)) for size in (keys, values)] for length in lengths]
    alone = []
    requests = []
    for (k, v), length in zip(tokens, lengths):
        alone.append(mlx_lm_cache.QuantizedKVCache(GROUP, BITS))
        requests.append(QuantizedKVCache(GROUP, BITS))
        for cache in (alone[-1], requests[-1]):
            cache.update_and_fetch(k[:, :, :length], v[:, :, :length])
        alone[-1].update_and_fetch(k[:, :, length:], v[:, :, length:])
    batch = QuantizedKVCache.merge(requests[:1])
    if rows > 1:
        batch.extend(QuantizedKVCache.merge(requests[1:]))
    new = [[each[part][:, :, -more:] for each in tokens] for part in (0, 1)]
    batch.update_and_fetch(*map(mx.concatenate, new))
    assert batch.offset.tolist() == [length + more for length in lengths]
    assert all(part.offset is batch.offset for part in batch.caches)  # one graph, which attention evaluates
    kept = list(range(rows))[-2:]
    batch.filter(kept)
    for row, request in enumerate(kept):
        found, expected = batch.extract(row).state, alone[request].state
        assert found[2:] == expected[2:]
        for mine, theirs in zip(found[:2], expected[:2]):
            assert all(mx.array_equal(a, b[:, :, : found[2]]) for a, b in zip(mine, theirs))


@pytest.fixture
def wide(monkeypatch):
    """Heads of tiny models are as wide as a group."""
    monkeypatch.setattr(tiny_models, "SIZES", tiny_models.SIZES | {name: 2 * tiny_models.SIZES[name] for name in WIDER})


def serve(kind, tokenizer):
    """True where requests have the tokens of mlx-lm alone; why they cannot be served, where mlx-lm cannot either.

    With 8 bits: of 4, one that rounds the other way moves logits by 0.01, and other tokens are as close as that.
    """
    model = tiny_models.build(kind)
    try:
        expected = overlapping.alone(model, lambda model: quantized(model, 8))
    except (ValueError, TypeError, AttributeError):
        expected = None
    try:
        quantize_caches(model, GROUP, 8)
        worker = Worker(model, tokenizer, BatchLimits(prefill_step_size=4))
        worker.warm_up()
    except InvalidArgument as error:
        return str(error)
    found, cached = overlapping.overlapping(worker, expected[0])
    return found == expected and cached > 0


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "qwen3_next", *REFUSED])
def test_models(loaded, wide, kind):
    """With sliding windows or states of linear attention between quantized caches; and what mlx-lm cannot compute."""
    found = serve(kind, loaded[1])
    assert REFUSED[kind] in found if kind in REFUSED else found is True


@pytest.mark.long
def test_every_model(loaded, wide):
    found = {kind: serve(kind, loaded[1]) for kind in tiny_models.compared_files() if kind not in CANNOT_BE_WIDE}
    assert [kind for kind, each in found.items() if each is False] == []
    assert sum(each is True for each in found.values()) >= 75


def test_heads_that_are_no_multiple_of_a_group(loaded):
    model = tiny_models.build("qwen3")
    quantize_caches(model, 64, 4)
    with pytest.raises(InvalidArgument, match="--kv-bits.: .quantize. The last dimension"):
        Worker(model, loaded[1], BatchLimits()).warm_up()


def test_bytes_of_a_token(folder, loaded):
    """4 bits, and of 32 elements a scale and a bias in float32: 6 in place of 32."""
    model, _ = load_model(folder)
    quantize_caches(model, GROUP, BITS)
    assert cache_sizes(model, 64)[0] == cache_sizes(loaded[0], 64)[0] * 6 / 32 > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks, options",
    [(2, [])]
    + [pytest.param(ranks, [], marks=pytest.mark.long) for ranks in (1, 3)]
    + [
        pytest.param(ranks, options, marks=pytest.mark.long)
        for ranks, options in (
            (3, ["--pipeline"]),
            (2, ["--prompt-lookup"]),
            (2, ["--draft-model", "MODEL"]),
            (2, ["--shard-vocabulary"]),
            (2, ["--split-blocks"]),
            (2, ["--adapter", "unused=ADAPTER"]),
        )
    ],
)
def test_a_server_answers_as_one_process(folder, tmp_path, ranks, options):
    adapter = save_adapters(tmp_path / "adapter", folder, seed=1)
    options = [option.replace("MODEL", str(folder)).replace("ADAPTER", str(adapter)) for option in options]
    require_answers(folder, ranks, *OPTIONS, *options, make_cache=quantized)


@pytest.mark.long
def test_the_prefix_cache_on_disk(folder, tmp_path):
    """Of the same quantization; of another one it is not used."""
    prompt, found = "a prompt that is answered twice", []
    for bits in (4, 4, 8):
        options = ["--kv-bits", bits, "--kv-group-size", GROUP, "--prompt-cache-dir", tmp_path]
        with ServerProcess(folder, 1, *options) as server:
            answer = server.ask({"prompt": prompt, "max_tokens": 6})
            assert server.stop() == 0, "".join(server.lines)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        found.append((answer["choices"][0]["text"], cached))
    first, again, other = found
    assert first[1] == other[1] == 0 and again == (first[0], len(prompt) - 1)
