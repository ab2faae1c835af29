"""A rank is killed at a random point of the resume, of a step or of a save, again and again: only the steps since the
last complete checkpoint are done a second time, with the same results."""

import random

import pytest

ROUNDS = 25  # each, of two


@pytest.mark.long
@pytest.mark.parametrize("disk", ["shared", "own"])
def test_a_kill_costs_the_steps_since_the_last_checkpoint(run_ranks, tmp_path, disk):
    chance, digests, phases = random.Random(disk), {}, []
    for number in range(ROUNDS):
        last = max((int(path.parent.name[5:]) for path in tmp_path.rglob("manifest.json")), default=0)
        phase, most = chance.choice([("resume", 1), ("step", 9), ("save", 3)])
        phases.append(phase)
        victim, count, delay = chance.randrange(2), chance.randint(1, most), chance.uniform(0, 0.03)
        where = disk, number, phase, victim, count, delay
        arguments = tmp_path, disk, victim, phase, count, delay
        output = "".join(run_ranks("checkpoint_kills.py", 2, *arguments, status=None))
        assert phase == "resume" or output.count("resumed") == 2, (where, output)
        for line in output.splitlines():
            match line.split():
                case "resumed", step, digest if int(step):
                    assert int(step) == last, where
                    assert digests[int(step)] == digest, where
                case "resumed", _, _:
                    assert last == 0, where
                case "did", step, digest:
                    assert int(step) > last and digests.setdefault(int(step), digest) == digest, where
    assert set(phases) == {"resume", "step", "save"} and last >= 9, (phases, last)
    steps = [path for path in tmp_path.rglob("step-*") if path.is_dir()]
    assert len(steps) <= 2 * 4, "what killed saves have left is removed by the next ones"
