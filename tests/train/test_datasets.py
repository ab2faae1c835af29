"""train.load_dataset: mlx-lm's formats and text files, and bad lines in one sentence before any work."""

import json

import pytest

from mlxdist import train
from mlxdist.base.errors import InvalidArgument


class Letters:
    """A tokenizer: the code points, and 0 for the end."""

    eos_token_id = 0

    def encode(self, text):
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages, tools=None, add_generation_prompt=False, return_dict=False):
        return [code for message in messages for code in [1, *self.encode(message["content"])]] + [
            1
        ] * add_generation_prompt


CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]


def load(tmp_path, *lines, name="train.jsonl", **options):
    (tmp_path / name).write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return train.load_dataset(tmp_path, Letters(), name.split(".")[0], **options)


def test_texts(tmp_path):
    dataset = load(tmp_path, '{"text": "ab"}', "", '{"text": "c"}\r', "  ", name="valid.jsonl")
    assert len(dataset) == 2 and dataset[0] == ([97, 98, 0], 0) and dataset[1] == ([99, 0], 0)
    assert len(train.load_dataset(str(tmp_path / "valid.jsonl"), Letters())) == 2


@pytest.mark.parametrize("record", [{"messages": CHAT}, {"prompt": "ab", "completion": "c"}])
@pytest.mark.parametrize("mask_prompt, offset", [(False, 0), (True, 4)])
def test_chats_and_completions(tmp_path, record, mask_prompt, offset):
    tokens, found = load(tmp_path, json.dumps(record), mask_prompt=mask_prompt)[0]
    assert tokens == [1, 97, 98, 1, 99] and found == offset


def test_a_text_file_is_one_sample(tmp_path):
    dataset = load(tmp_path, "a b", "c", name="train.txt")
    assert len(dataset) == 1 and dataset[0][0] == [*map(ord, "a b\nc"), 0]


def test_a_byte_order_mark_is_not_read(tmp_path):
    assert load(tmp_path, "\ufeffab", name="train.txt")[0][0] == [97, 98, 0]
    assert load(tmp_path, '\ufeff{"text": "ab"}', name="valid.jsonl")[0][0] == [97, 98, 0]


def test_a_path_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    load(tmp_path, '{"text": "ab"}')
    assert len(train.load_dataset("~/train.jsonl", Letters())) == len(train.load_dataset("~", Letters())) == 1


@pytest.mark.parametrize(
    "lines, problem",
    [
        (['{"text": "a"}', "{'text': 1}"], "train.jsonl, line 2 is not JSON: column 2: Expecting"),
        (['{"text": "a"}', "", '{"text": NaN}'], "line 3 is not JSON: NaN is not a number"),
        (['{"text": "a"}', b'{"text": "\xff"}'], "line 2 is not JSON: byte 10 is not UTF-8"),
        (['{"words": "a"}'], 'line 1 is no object with "prompt" and "completion", or "messages", or "text"'),
        (["[1]"], "line 1 is no object with"),
        (['{"text": "a"}', '{"prompt": "a"}'], 'line 2 has no "text", which the first record has'),
        (['{"text": "a"}', "7"], 'line 2 has no "text"'),
        (['{"text": "a"}', '{"text": ""}'], "line 2: text is '', not a text"),
        (['{"text": "a"}', '{"text": 5}'], "line 2: text is 5, not a text"),
        (['{"messages": []}'], "line 1: messages is \\[\\], not a list of messages"),
        (['{"messages": [{"content": "a"}]}'], "line 1: messages is .*, not a list of messages"),
        (['{"prompt": "a", "completion": null}'], "line 1: completion is None, not a text"),
        (["", " "], "train.jsonl is empty"),
        ([], "train.jsonl is empty"),
    ],
)
def test_bad_lines(tmp_path, lines, problem):
    with pytest.raises(InvalidArgument, match=problem):
        load(tmp_path, *lines)


def test_bad_files(tmp_path):
    with pytest.raises(InvalidArgument, match="has neither train.jsonl nor train.txt"):
        train.load_dataset(tmp_path, Letters())
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        train.load_dataset(tmp_path / "other.jsonl", Letters())
    with pytest.raises(InvalidArgument, match="neither a directory nor a .jsonl or .txt file"):
        train.load_dataset(tmp_path / "other.csv", Letters())
    with pytest.raises(InvalidArgument, match="train.txt: byte 0 is not UTF-8"):
        load(tmp_path, b"\xff", name="train.txt")
    with pytest.raises(InvalidArgument, match="leave mask_prompt out"):
        load(tmp_path, '{"text": "a"}', mask_prompt=True)


def test_datasets_of_hugging_face(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    rows = [{"prompt": "ab", "completion": "c"}, {"prompt": "", "completion": "d"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    dataset = train.load_dataset(tmp_path, Letters(), mask_prompt=True)
    assert len(dataset) == 2 and dataset[0] == ([1, 97, 98, 1, 99], 4)
    batch, lengths = next(train.Batches(dataset, 2, shuffle=False))
    assert batch[1, :3].tolist() == [1, 1, 100] and lengths.tolist() == [[4, 5], [2, 3]]
    with pytest.raises(InvalidArgument, match="has no split 'valid', or an empty one"):
        train.load_dataset(tmp_path, Letters(), "valid")
