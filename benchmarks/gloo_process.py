"""One rank of gloo, for vs_peers.py: reads a block per line, runs it, answers with its times. Needs torch, not MLX."""

import json
import sys
import time

import torch
import torch.distributed


def numbers(elements: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(elements) * 31 + rank * 17) % 32).to(dtype)


def count_wrong(elements: int, dtype: torch.dtype) -> int:
    """One all_reduce of numbers whose sum is exact in every dtype."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    x = numbers(elements, rank, dtype)
    torch.distributed.all_reduce(x)
    expected = sum(numbers(elements, other, dtype) for other in range(size))
    return int((x != expected).sum())


def block(x: torch.Tensor, operations: int, calls: int) -> list[float]:
    torch.distributed.barrier()
    times = [time.perf_counter_ns()]
    for _ in range(calls):
        for _ in range(operations):
            torch.distributed.all_reduce(x)
        times.append(time.perf_counter_ns())
    return [(end - begin) / 1e3 / operations for begin, end in zip(times, times[1:])]


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    known, x = None, torch.zeros(0)
    for line in sys.stdin:
        asked, answer = json.loads(line), {}
        if asked:
            dtype, wrong = getattr(torch, asked["dtype"]), 0
            if known != (asked["dtype"], asked["elements"]):
                known = (asked["dtype"], asked["elements"])
                wrong = count_wrong(asked["elements"], dtype)
                x = torch.zeros(asked["elements"], dtype=dtype)  # sums of zeros stay finite however many
            answer = {"microseconds": block(x, asked["operations"], asked["calls"]), "wrong": wrong}
        print(json.dumps(answer), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
