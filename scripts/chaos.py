#!/usr/bin/env python3
"""Runs random collectives on 2 to 4 ranks while ranks are killed, stopped and resumed, and messages get lost.

Every rank that is left must get right results, or the right error in time, and nothing may be left behind. Rounds are
made from consecutive seeds (tests/chaos/plan.py); the first one that fails is printed, and played again by

    chaos.py --seed SEED --rounds 1

What goes on at the same time does not repeat exactly: try several times.
"""

import argparse
import collections
import json
import random
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "chaos")]

import plan
from job import Failed, Job


class Chaos:
    """Plays rounds, on the same ranks as long as these can be used."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.slowest = 0.0
        self.jobs = 0
        self._job: Job | None = None

    def play(self, seed: int) -> None:
        round_ = plan.make(seed)
        kinds = {event["what"] for event in round_["events"]}
        self.counts[" + ".join(sorted(kinds)) or "undisturbed"] += 1
        if self._job and (self._job.ranks, self._job.environment) != (round_["ranks"], round_["environment"]):
            self.end()
        if self._job is None:
            self.jobs += 1
            self._job = Job(round_["ranks"], round_["environment"]).__enter__()
        try:
            self._job.play(round_)
        except Failed as failed:
            job, self._job = self._job, None
            try:
                job.__exit__(Failed, failed, None)
            except Failed as with_logs:
                raise Failed(f"round {seed}: {with_logs}\n{json.dumps(round_)}") from None
        self.slowest = max(self.slowest, self._job.slowest)
        if round_["ends"] is not None or round_["wears"]:
            self.end()

    def end(self) -> None:
        """Ends the ranks of the last round. Raises Failed if something of them is left."""
        job, self._job = self._job, None
        if job is not None:
            job.__exit__(None, None, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="number of rounds (default: until the time is over)")
    parser.add_argument("--minutes", type=float, default=60, help="at most so long (default: %(default)g)")
    parser.add_argument("--seed", type=int, help="of the first round (default: a random one)")
    options = parser.parse_args()
    seed = random.randrange(10**9) if options.seed is None else options.seed
    print(f"chaos: begins with seed {seed}", flush=True)
    begun, chaos, played = time.monotonic(), Chaos(), 0
    try:
        while (options.rounds is None or played < options.rounds) and time.monotonic() - begun < 60 * options.minutes:
            chaos.play(seed + played)
            played += 1
        chaos.end()
    except Failed as failed:
        print(f"chaos: failed after {played} rounds\n{failed}\nchaos.py --seed {seed + played} --rounds 1")
        return 1
    finally:
        chaos.end()
    seconds = time.monotonic() - begun
    print(f"chaos: {played} rounds on {chaos.jobs} sets of ranks in {seconds:.0f} s")
    print(*(f"{count:6} {kinds}" for kinds, count in chaos.counts.most_common()), sep="\n")
    print(f"a killed rank was noticed by all within {chaos.slowest:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
