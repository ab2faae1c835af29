"""Datasets from files: JSON lines in the formats of mlx-lm, plain text, and what Hugging Face's datasets reads."""

import os
from collections.abc import Iterator
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.operations.arguments import group_of

from .rows import Dataset

__all__ = ["digest_of", "load_dataset"]

# What a record has, by the names that mlx-lm has for it; the first format that the first record fits is that of all.
_FORMATS = (("prompt", "completion"), ("messages",), ("text",))


def load_dataset(
    path: str | os.PathLike[str],
    tokenizer: Any,
    split: str = "train",
    *,
    mask_prompt: bool = False,
    group: GroupLike | None = None,
) -> Dataset:
    """A dataset of a file, or of ``train.jsonl`` in a directory. All ranks call it, and need the same file.

    Each line of a ``.jsonl`` file is a sample, with "text", with "prompt" and "completion", or with "messages" of a
    chat and perhaps "tools": the formats of mlx-lm, which makes tokens of them when they are first used. A ``.txt``
    file is one sample, for packed rows. All lines are checked here. A directory with neither is read by Hugging Face's
    datasets (Parquet, for example), if that is installed; its columns have the same names.

    Args:
        path: the file, or a directory with one that is named after ``split``, or one of Hugging Face.
        tokenizer: of mlx-lm or transformers.
        split: "train", "valid" or "test"; for a directory.
        mask_prompt: only what follows the prompt is a target. Not for "text".
        group: the ranks that compare their files; ``None`` for those of ``mlxdist.init()``.

    Returns:
        mlx-lm's CacheDataset: (token ids, offset) by number.

    Raises:
        InvalidArgument: on all ranks alike: there is no such file; a line, whose number the text has, is not JSON or no
            sample of the format that the first has; ``mask_prompt`` is set for texts.
        Mismatch: on all ranks: they have different files.
    """
    from mlx_lm.tuner.datasets import CacheDataset, create_dataset

    config = SimpleNamespace(mask_prompt=mask_prompt)
    found: list[str] = []
    with agreed("load_dataset", group_of(group), found, bool(mask_prompt)):
        file = _file(Path(path).expanduser(), split)
        if file.is_dir():
            samples = _of_hugging_face(file, split, tokenizer, config)
            found.append(f"{len(samples)} samples")
        else:
            data = _read(file)
            found.append(_digest(data))
            records = list(_lines(file, data) if file.suffix == ".jsonl" else _document(file, data))
            _check_formats(file, records, mask_prompt)
            samples = create_dataset([record for _, record in records], tokenizer, config)
    return CacheDataset(samples)


def digest_of(path: str | os.PathLike[str], split: str) -> str:
    """A text that differs for other data: by a file's contents, or by the names and sizes of a directory's files.

    Raises:
        InvalidArgument: the data cannot be read.
    """
    file = _file(Path(path), split)
    if not file.is_dir():
        return _digest(_read(file))
    sizes = sorted((str(one.relative_to(file)), one.stat().st_size) for one in file.rglob("*") if one.is_file())
    return _digest(repr(sizes).encode())


def _digest(data: bytes) -> str:
    return f"{len(data)} bytes with the hash {blake2b(data, digest_size=8).hexdigest()}"


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"load_dataset: {file} cannot be read: {error.strerror}") from None


def _file(path: Path, split: str) -> Path:
    """The file of the split; the directory itself if it has none."""
    if not path.is_dir():
        if path.suffix not in (".jsonl", ".txt"):
            raise InvalidArgument(f"load_dataset: {path} is neither a directory nor a .jsonl or .txt file")
        return path
    return next((file for file in (path / f"{split}.jsonl", path / f"{split}.txt") if file.exists()), path)


def _of_hugging_face(directory: Path, split: str, tokenizer: Any, config: SimpleNamespace) -> Any:
    from mlx_lm.tuner.datasets import load_hf_dataset

    missing = f"load_dataset: {directory} has neither {split}.jsonl nor {split}.txt"
    if find_spec("datasets") is None:
        raise InvalidArgument(f"{missing}; other files need Hugging Face's datasets: `pip install datasets`")
    try:
        samples = dict(zip(("train", "valid", "test"), load_hf_dataset(str(directory), tokenizer, config)))
    except Exception as error:  # of whatever library reads these files
        raise InvalidArgument(f"{missing}, and Hugging Face's datasets cannot read it: {error}") from error
    if not len(samples.get(split, [])):
        raise InvalidArgument(f"load_dataset: the dataset in {directory} has no split {split!r}, or an empty one")
    return samples[split]


def _document(file: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    if data:
        try:
            # Editors on Windows begin a file with a byte order mark, which is no part of the text.
            yield str(file), {"text": data.decode("utf-8-sig")}
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"load_dataset: {file}: byte {error.start} is not UTF-8") from None


def _lines(file: Path, data: bytes) -> Iterator[tuple[str, Any]]:
    """Yields the place of each record, and the record. Lines of white space alone are skipped."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                yield f"{file}, line {number}", parse_json(line)
            except ValueError as error:
                problem = str(error).removeprefix("line 1, ")
                raise InvalidArgument(f"load_dataset: {file}, line {number} is not JSON: {problem}") from None


def _format(record: Any) -> tuple[str, ...]:
    """The names of the format that a record has; () if it has none."""
    fitting = (names for names in _FORMATS if isinstance(record, dict) and all(name in record for name in names))
    return next(fitting, ())


def _check_formats(file: Path, records: list[tuple[str, Any]], mask_prompt: bool) -> None:
    if not records:
        raise InvalidArgument(f"load_dataset: {file} is empty")
    names = _format(records[0][1])
    if not names:
        formats = ", or ".join(" and ".join(f'"{name}"' for name in format) for format in _FORMATS)
        raise InvalidArgument(f"load_dataset: {records[0][0]} is no object with {formats}")
    for where, record in records:
        for name in names:
            if not isinstance(record, dict) or name not in record:
                raise InvalidArgument(f'load_dataset: {where} has no "{name}", which the first record has')
            if name == "messages" and not _is_chat(record[name]):
                raise InvalidArgument(f"load_dataset: {where}: {name} is {record[name]!r:.50}, not a list of messages")
            if name != "messages" and (not isinstance(record[name], str) or (name == "text" and not record[name])):
                raise InvalidArgument(f"load_dataset: {where}: {name} is {record[name]!r:.50}, not a text")
    if mask_prompt and names == ("text",):
        raise InvalidArgument(f"load_dataset: {file} has texts without a prompt; leave mask_prompt out")


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(m, dict) and "role" in m for m in value)
