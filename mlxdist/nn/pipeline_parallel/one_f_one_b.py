"""Orders the micro-batches of the ranks of a pipeline: one forward, one backward pass in turn."""

from collections.abc import Iterator

from .timeline import Action

__all__ = ["one_f_one_b"]


def one_f_one_b(
    stages: int, micro_batches: int, virtual: int = 1, *, all_forward: bool = False, splits: bool = False
) -> Iterator[tuple[Action, ...]]:
    """Yields the actions of each rank: as many forward passes as the first gradient takes to come, then one of each.

    Args:
        stages: ranks of the pipeline.
        micro_batches: of a step.
        virtual: stages of each rank: the interleaved schedule, if it is more than one.
        all_forward: computes all forward passes first, as GPipe does.
        splits: computes a backward pass as I and W, and W later, where the stage would wait: the zero bubble schedule.
    """
    # A round is what one virtual stage computes before the rank goes on with its next one.
    rounds = 1 if all_forward else max(1, micro_batches // stages)
    ends = [micro_batches * number // rounds for number in range(rounds + 1)]
    forward, backward = list[tuple[int, int]](), list[tuple[int, int]]()
    for start, stop in zip(ends, ends[1:]):
        forward += [(number, chunk) for chunk in range(virtual) for number in range(start, stop)]
        backward += [(number, chunk) for chunk in reversed(range(virtual)) for number in range(start, stop)]
    longest = -(-micro_batches // rounds)
    for rank in range(stages):
        behind = stages - rank - 1
        ahead = len(forward) if all_forward else behind if virtual == 1 else 2 * behind + (virtual - 1) * longest
        # The first stage has no gradient to send, so it gains nothing by delaying W; the last can delay it longest.
        yield tuple(_in_turn(forward, backward, min(ahead, len(forward)), rank if splits else None))


def _in_turn(
    forward: list[tuple[int, int]], backward: list[tuple[int, int]], ahead: int, delay: int | None
) -> Iterator[Action]:
    """Yields ``ahead`` F, then F and B in turn. ``delay``: each B is an I, and its W comes that many I's later."""
    for pair in forward[:ahead]:
        yield Action("F", *pair)
    for number, pair in enumerate(backward):
        if ahead + number < len(forward):
            yield Action("F", *forward[ahead + number])
        yield Action("B" if delay is None else "I", *pair)
        if delay is not None and number >= delay:
            yield Action("W", *backward[number - delay])
    if delay is not None:
        for pair in backward[max(0, len(backward) - delay) :]:
            yield Action("W", *pair)
