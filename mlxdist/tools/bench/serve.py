"""`mlxdist bench serve`: `mlxdist serve` and mlx_lm.server under the same load."""

from __future__ import annotations

import contextlib
import random
import string
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import numpy as np
from rich.console import Console

import mlxdist
from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.base.model_directory import model_directory
from mlxdist.launch.run_job import host_arguments

from .benchmark import Benchmark
from .machine import describe_command
from .results import Result, Results, Target, by_case, case_name, spread, table_of
from .runner import ONE_THREAD, Runner, progress_bar, require_package
from .serve_load import ANSWER_SIGMA, PROMPT_SIGMA, Answer, arrivals, ask_all, lengths
from .serve_servers import ALONE, DRAFTS, MLX_LM, OURS, OWN_LAYERS, RING, Job, accepted_drafts, running
from .sizes import names_of
from .timing import exchange, quantiles
from .workload import BenchmarkWorkload

__all__ = ["Alone", "serve", "targets"]

SERVERS = (OURS, OWN_LAYERS, DRAFTS, MLX_LM, RING, ALONE)
LOADS = ("streams", "arrivals")
ALL_TOKENS, FIRST_TOKEN, NEXT_TOKEN = "tokens", "first token", "next token"
FASTER_THAN_MLX_LM, FASTER_THAN_RING, FASTER_WITH_DRAFTS = 1.3, 1.5, 1.4
WARM_UP = 8  # requests at once, which a server answers before those that count
_PERCENTILES = ("median", "p95", "p99")
_COUNT = click.IntRange(1, 4096)
# Two logits that are closer than this may change places with the batch, or with the number of ranks.
_CLOSE_FLOAT32, _CLOSE = 1e-4, 0.25


@dataclass(frozen=True)
class Load:
    """Requests and the seconds at which they arrive; ``questions`` are cases of `Alone`."""

    case: dict[str, Any]
    times: list[float]
    questions: list[dict[str, Any]]


class Alone(BenchmarkWorkload):
    """Cases: "questions", one for each rank at most. Each has "name", "prompt_tokens", "answer_tokens".

    Parameters: model. The result of a question is its "prompt", the "answer" of mlx-lm on one process, and how
    many of its characters are "certain": those before the first token to which another one comes close.
    """

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        from mlx_lm import load

        if mx.is_available(mx.gpu):  # as the servers do
            mx.set_default_device(mx.gpu)
        super().__init__(world, parameters)
        self.model, self.tokenizer, *_ = load(str(model_directory(parameters["model"])))
        self.summary = {"device": mx.default_device().type.name}

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        questions = case["questions"]
        own = questions[self.world.rank()] if self.world.rank() < len(questions) else None
        return exchange(own and self._answered(own), self.world)[: len(questions)]

    def _answered(self, question: dict[str, Any]) -> dict[str, Any]:
        from mlx_lm import stream_generate

        prompt = self._prompt(question)
        answer, certain = "", None
        made = stream_generate(
            self.model, self.tokenizer, self.tokenizer.encode(prompt), max_tokens=question["answer_tokens"]
        )
        for response in made:
            close = _CLOSE_FLOAT32 if response.logprobs.dtype == mx.float32 else _CLOSE
            best = mx.topk(response.logprobs, 2)
            if certain is None and bool(mx.abs(best[0] - best[1]) < close):
                certain = len(answer)
            answer += response.text
        return {"prompt": prompt, "answer": answer, "certain": len(answer) if certain is None else certain}

    def _prompt(self, question: dict[str, Any]) -> str:
        """A prompt of random letters, so that no prompt is a prefix of another. It may have a few tokens less than the
        question says, since tokens may join when its text is encoded again."""
        generator = random.Random(question["name"])
        letters = "".join(generator.choices(string.ascii_lowercase, k=8 * question["prompt_tokens"]))
        tokens = self.tokenizer.encode(letters, add_special_tokens=False)
        return self.tokenizer.decode(tokens[: question["prompt_tokens"]])


def _load(name: str, described: dict[str, Any], seed: int, **numbers: Any) -> Load:
    means = {"prompt": numbers["prompt_tokens"], "answer": numbers["answer_tokens"]}
    if name == "streams":
        count = numbers["streams"]
        case = {"streams": count}
        times, sizes = [0.0] * count, [tuple(means.values())] * count
    else:
        count, context = numbers["requests"], numbers["max_context"]
        case = {"rate": f"{numbers['rate']:g}/s", "requests": count}
        times = arrivals(numbers["rate"], count, seed)
        prompts = lengths(means["prompt"], PROMPT_SIGMA, count, context // 2, f"prompts {seed}")
        answers = lengths(means["answer"], ANSWER_SIGMA, count, context // 2, f"answers {seed}")
        sizes = list(zip(prompts, answers))
    questions = [
        {"name": f"{name} {seed} {number}", "prompt_tokens": prompt, "answer_tokens": answer}
        for number, (prompt, answer) in enumerate(sizes)
    ]
    return Load(case | described | means, times, questions)


@contextlib.contextmanager
def _where(runner: Runner) -> Iterator[list[str]]:
    """The launcher's options for the ranks."""
    if runner.selection.hostfile is None:
        yield ["-n", str(runner.ranks)]
        return
    from mlxdist.cluster.ssh.ssh import is_this_machine

    first = runner.selection.hosts()[0].name
    if not is_this_machine(first):
        raise click.UsageError(f"rank 0 would be on {first}, and its server has to be on this machine")
    with host_arguments(runner.selection) as words:
        yield [*words, "--cwd", "/"]  # the directory of this process may not exist there


def _reference(runner: Runner, model: str, loads: Sequence[Load]) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Returns the ranks' summary of the run, and for each load the answers that one process gives."""
    questions = [question for load in loads for question in load.questions]
    shared = [{"questions": questions[at : at + runner.ranks]} for at in range(0, len(questions), runner.ranks)]
    job = runner.job(shared, variables=ONE_THREAD, model=model)
    answers = iter([answer for row in job["rows"] for answer in row])
    return job, [[next(answers) for _ in load.questions] for load in loads]


class _Seen:
    """The observations of a server's clients under a load, in all rounds."""

    def __init__(self, load: Load, expected: list[dict[str, Any]]) -> None:
        self.load, self.expected = load, expected
        self.answers: list[Answer] = []
        self.each: list[float] = []  # microseconds for a token of all streams, of each round
        self.wrong = 0
        self.accepted: float | None = None  # of drafts

    def take(self, port: int) -> None:
        """Measures one round. Errors are those of `ask_all`."""
        bodies = [
            {"prompt": expected["prompt"], "max_tokens": question["answer_tokens"]}
            for question, expected in zip(self.load.questions, self.expected)
        ]
        answers, seconds = ask_all(port, bodies, self.load.times)
        self.answers += answers
        self.each.append(seconds * 1e6 / sum(answer.tokens for answer in answers))
        self.wrong += sum(not _is_right(answer.text, right) for answer, right in zip(answers, self.expected))

    def results(self, name: str) -> list[dict[str, Any]]:
        gaps = [gap * 1e6 for answer in self.answers for gap in answer.gaps]
        times = {
            ALL_TOKENS: self.each,
            FIRST_TOKEN: [answer.first * 1e6 for answer in self.answers],
            NEXT_TOKEN: gaps or [0.0],
        }
        why = f"{self.wrong} of {len(self.answers)} answers are wrong" if self.wrong else None
        why = why or (None if gaps else "no answer has two tokens")
        shared = {"variant": name, "wrong": self.wrong, "refused": why, "answers": len(self.answers)}
        shared["certain"] = sum(each["certain"] == len(each["answer"]) for each in self.expected)
        shared |= {"questions": len(self.expected), "accepted": self.accepted}
        found = []
        for key, row in times.items():
            case, measured = {"operation": key} | self.load.case, quantiles(np.array(row))
            found.append({"case": case, "microseconds": None if why else measured} | shared)
        return found


def _is_right(text: str, expected: dict[str, Any]) -> bool:
    certain, answer = expected["certain"], expected["answer"]
    return text == answer if certain == len(answer) else text.startswith(answer[:certain])


def _measure(
    runner: Runner, job: Job, servers: Sequence[str], loads: Sequence[Load], expected: list[Any], log: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the results of all servers, and the reasons for those that have failed.

    Raises:
        click.ClickException: `mlxdist serve` has failed.
    """
    rounds = runner.repeats or 1
    seen = {name: [_Seen(load, answers) for load, answers in zip(loads, expected)] for name in servers}
    failed: dict[str, str] = {}
    with progress_bar() as progress:
        task = progress.add_task(runner.name, total=rounds * len(servers))
        for turn in range(rounds):
            # One server at a time, with new processes: a rank of MLX's ring that waits takes a core from the others. In
            # another order in each round, so that no server always follows the same one.
            for name in random.Random(turn).sample(list(servers), len(servers)):
                progress.update(task, description=f"{runner.name}: {name}")
                try:
                    if name not in failed:
                        _round(job, name, seen[name], log)
                except ResourceError as error:
                    failed[name] = f"it failed in round {turn + 1} of {rounds}: {error}"
                    if name == OURS:
                        raise click.ClickException(f"{name}: {failed[name]}") from None
                progress.advance(task)
    names = [name for name in servers if name not in failed]
    # Of each case all servers, one after the other.
    found = [[one.results(name) for one in seen[name]] for name in names]
    rows = [result for of_load in zip(*found) for of_case in zip(*of_load) for result in of_case]
    return rows, [{"variant": name, "absent": why} for name, why in failed.items()]


def _round(job: Job, name: str, seen: Sequence[_Seen], log: Path) -> None:
    with running(job, name, log) as port:
        ask_all(port, [{"prompt": f"{number}", "max_tokens": 16} for number in range(WARM_UP)], [0.0] * WARM_UP)
        for one in seen:
            one.take(port)
            one.accepted = accepted_drafts(port) if name == DRAFTS else None


def _show(results: Results, console: Console) -> None:
    columns = ["server", "tokens/s", *(f"{key}, ms\np50 / p95 / p99" for key in (FIRST_TOKEN, NEXT_TOKEN))]
    rows = by_case(results)
    for throughput, first, following in zip(rows[::3], rows[1::3], rows[2::3]):
        cells = []
        for name, result in throughput.items():
            cells.append([name, _per_second(result), *(_milliseconds(each[name]) for each in (first, following))])
        one = next(iter(throughput.values()))
        title = case_name(one["case"] | {"operation": "requests"})
        console.print(table_of(f"{title}, on {results['setup']['ranks']} ranks", columns, cells))
        if DRAFTS in throughput and (accepted := throughput[DRAFTS]["accepted"]) is not None:
            console.print(f"{accepted:.0%} of the drafts became tokens of an answer.")
        if one["certain"] < one["questions"]:
            console.print(
                f"{one['certain']} of {one['questions']} answers are compared to their end, the others up to the first "
                "token to which another one comes close."
            )


def _milliseconds(result: Result) -> str:
    times = result["microseconds"]
    return " / ".join(f"{times[name] / 1e3:.1f}" for name in _PERCENTILES) if times else ""


def _per_second(result: Result) -> str:
    times = result["microseconds"]
    ends = {"median": "median", "min": "max", "max": "min"}
    return spread(times and {name: 1e6 / times[end] for name, end in ends.items()})


def targets(results: Results) -> list[Target]:
    found = []
    for row in by_case(results):
        case = next(iter(row.values()))["case"]
        if case["operation"] == ALL_TOKENS and "streams" in case:
            for other, bound in ((MLX_LM, FASTER_THAN_MLX_LM), (RING, FASTER_THAN_RING)):
                found.append(Target.slower(case_name(case), row, OURS, [other], bound))
            if case["streams"] == 1:  # more make a step that is bound by computing
                found.append(Target.slower(case_name(case), row, DRAFTS, [OURS], FASTER_WITH_DRAFTS))
    return found


@Benchmark(Alone, show=_show, targets=targets, repeats=5, parameters={})
@click.argument("model", default="")
@click.option("--draft-model", default="", help="Of `mlxdist serve`, for MODEL.")
@click.option("--load", "loads", type=names_of(LOADS), default="all", help=f"{', '.join(LOADS)}.")
@click.option("--servers", type=names_of(SERVERS), default="all", help=f"Of {', '.join(SERVERS)}.")
@click.option("--streams", type=click.IntRange(1, 256), default=8, show_default=True, help="Requests at a time.")
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="Arrivals per second."
)
@click.option("--requests", type=click.IntRange(1, 1000), default=32, show_default=True, help="That arrive.")
@click.option("--prompt-tokens", type=_COUNT, default=161, show_default=True, help="Mean of prompts.")
@click.option("--answer-tokens", type=_COUNT, default=338, show_default=True, help="Mean of answers.")
@click.option("--max-context", type=click.IntRange(2), default=2048, show_default=True, help="Tokens of both at most.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals, lengths and prompts.")
@click.option("--hidden", type=click.IntRange(128, 65536), default=512, show_default=True, help="Without MODEL.")
@click.option("--layers", type=click.IntRange(1, 256), default=8, show_default=True, help="Without MODEL.")
def serve(
    runner: Runner,
    model: str,
    draft_model: str,
    loads: list[str],
    servers: list[str],
    hidden: int,
    layers: int,
    seed: int,
    **numbers: Any,
) -> Results:
    """Time the answers of `mlxdist serve`, and of mlx_lm.server on the same ranks.

    \b
        mlxdist bench serve
        mlxdist bench serve models/qwen --hostfile rmlx-hosts.json --rate 0.5 --requests 100

    "streams": --streams requests at once, of the same lengths. "arrivals": an open loop, in which requests arrive at
    random (Poisson) whether or not others have been answered; --rate inf for all at once. Their lengths are log-normal,
    by default with ShareGPT's means. Servers: `mlxdist serve` ("mlxdist"), with --no-split-blocks ("unsplit"), with a
    draft model ("drafts"), mlx_lm.server on mlxdist's group ("mlx-lm"), on MLX's ring ("ring"), and on one process
    ("alone"). They run one after the other, --repeats times.

    MODEL is a model of mlx-lm as for `mlxdist serve`; without it, Qwen2 with random weights in float32, and its first
    layer as draft model, which is right for about two of three tokens. Requests are greedy, as mlx_lm.server samples by
    a state that all requests share, and each answer is compared with that of mlx-lm on one process. The server of rank
    0 has to be on this machine.

    The exit status is 1 if an answer was wrong, `mlxdist serve` has failed, or a file is not written. Another server
    that fails is left out, with the reason.
    """
    require_package("mlx_lm", "lm")
    if runner.selection.hostfile is not None and not model:
        raise click.UsageError("give MODEL, which every host has; the one that is made is on this machine alone")
    if numbers["prompt_tokens"] + numbers["answer_tokens"] > numbers["max_context"]:
        raise click.UsageError("--prompt-tokens and --answer-tokens together are more than --max-context")
    try:
        found = [str(model_directory(name).absolute()) if name else "" for name in (model, draft_model)]
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None
    begin, setup = time.monotonic(), describe_command()
    described = {"model": Path(model).name} if model else {"hidden": hidden, "layers": layers}
    made = [_load(name, described, seed, **numbers) for name in loads]
    with tempfile.TemporaryDirectory(prefix="mlxdist-bench-") as directory, _where(runner) as where:
        if not model:
            from .byte_model import save_byte_model

            found = [directory, str(save_byte_model(Path(directory), hidden, layers))]
        if not found[1]:
            servers = [name for name in servers if name != DRAFTS]
        job = Job(found[0], found[1], where, runner.selection.python, runner.pinned, ONE_THREAD)
        reference, expected = _reference(runner, job.model, made)
        rows, absent = _measure(runner, job, servers, made, expected, Path(directory, "server.log"))
    measured = reference | {"rows": [rows], "absent": absent}
    return runner.results([measured], [load.case for load in made], setup | {"seconds": time.monotonic() - begin})
