"""What happens in a round of the chaos test: a program of collectives, and what is done to its ranks meanwhile.

A round is made from its seed alone, and is data: {"seed", "ranks", "environment", "steps", "events", "ends", "wears"}.
Four rounds with neighbouring seeds have the same ranks and environment, so that one set of ranks can play them, unless
one of them ends it. An event happens on a rank when it comes to a step:

    inject   the provider loses or garbles what this rank sends ("faults": mlxdist_group_inject_faults); with "seconds"
             nothing that it sends arrives, and after that time "then" is injected
    stop     SIGSTOP after "delay" seconds, and SIGCONT "seconds" later
    kill     SIGKILL after "delay" seconds
    die      SIGKILL instead of the SEND that "faults" says, if it comes to that
    abort    Group.abort("reason")
    differ   this rank calls the operation with another shape

"ends": None if all results must be right; else the "classes" of the error that every rank which is left must get, the
"texts" of which one must be in it, the text that must be in "all", and "maybe" where the event may come too late to
matter. "wears": the ranks are not as before, and no other round can use them.
"""

import random
from typing import Any

__all__ = ["ROUNDS_OF_A_SET", "make"]

ROUNDS_OF_A_SET = 4

OPERATIONS = [
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all",
    "all_to_all_v", "sendrecv", "barrier",
]  # fmt: skip
DTYPES = ["float32", "float16", "bfloat16", "int8", "int64", "uint16", "bool", "complex64"]
# Within a message, at its limits, what may be sent unasked, and more.
ROWS = [0, 1, 3, 100, 992, 993, 9000, 40_000, 100_000]
ALGORITHMS = ["auto", "auto", "direct", "mesh", "ring", "recursive_doubling", "tree"]
# Long enough for what is repeated and resumed on a busy machine.
PATIENT = 30
IMPATIENT = 2

PROFILES = ["ideal", "ideal", "ideal", "rxe", "apple-tb5"]

# What an unreliable connection does, and results are right all the same (soft/emulation/fault_injection.h). Damage is
# seen where messages have checksums.
KNOBS = [
    "drop=1/{chance}", "duplicate=1/{chance}", "truncate=1/{chance}", "drop=1/{chance},duplicate=1/{chance}",
    "drop=1/{chance},truncate=1/{chance},delay=200,jitter=300", "drop_next={few}", "drop_after={some}", "jitter=1000",
    "error_after={some}", "error=1/{chance}", "truncate_next={few}",
]  # fmt: skip
WITH_CHECKSUM = ["corrupt=1/{chance}", "corrupt_next={few}", "corrupt=1/{chance},drop=1/{chance}"]


def make(seed: int) -> dict[str, Any]:
    shared, own = random.Random(f"set {seed // ROUNDS_OF_A_SET}"), random.Random(f"round {seed}")
    ranks = shared.choice([2, 2, 3, 3, 4])
    cables = shared.choice([1, 1, 2, 3, 4])
    environment = {
        "MLXDIST_ALGO": shared.choice(ALGORITHMS),
        "MLXDIST_LINKS_PER_PEER": str(cables),
        "MLXDIST_ON_DEMAND_THRESHOLD": shared.choice(["8", "8", "8", "1"]),
        "MLXDIST_CHECKSUM": shared.choice("001"),
        "MLXDIST_SOFT_PROFILE": shared.choice(PROFILES),
        "MLXDIST_TIMEOUT": str(shared.choice([PATIENT] * 5 + [IMPATIENT])),
    }
    plan = {
        "seed": seed,
        "ranks": ranks,
        "environment": environment,
        "steps": _steps(own, ranks),
        "events": [],
        "ends": None,
        "wears": False,
    }
    impatient = environment["MLXDIST_TIMEOUT"] == str(IMPATIENT)
    if impatient and seed % ROUNDS_OF_A_SET == ROUNDS_OF_A_SET - 1:
        _silence(plan, own)
        return plan
    if not impatient:
        _disturb(plan, own, cables)
    if own.random() < 0.35:
        own.choice([_kill, _kill, _die, _abort, _differ])(plan, own)
    return plan


def _steps(random: random.Random, ranks: int) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    groups = 1
    for _ in range(random.randint(4, 12)):
        kind = random.choice(["operation"] * 8 + ["burst", "split"])
        if kind == "split" and groups < 4:
            colors, keys = ([random.randint(-1, 2) for _ in range(ranks)] for _ in range(2))
            steps.append({"do": "split", "group": random.randrange(groups), "colors": colors, "keys": keys})
            groups += 1
            continue
        step = _operation(random, groups)
        if kind == "burst":
            step |= {"do": "burst", "each": random.choice(OPERATIONS[:-1]), "groups": list(range(groups))}
            step["dtype"] = random.choice(DTYPES)
        steps.append(step)
    return steps


def _operation(random: random.Random, groups: int) -> dict[str, Any]:
    how = random.choice(["at once", "handle", "in place", "mlx"])
    return {
        "do": random.choice(OPERATIONS),
        "group": random.randrange(groups),
        "how": how,
        "wait_after": random.randint(1, 8) if how == "handle" else 0,
        "dtype": random.choice(["float32", "int32"] if how == "mlx" else DTYPES),
        "op": random.choice(["sum", "max", "min", "prod"]),
        "root": random.randrange(8),
        "rows": random.choice(ROWS),
        "row": random.choice([[], [1], [2, 3]]),
    }


def _add(plan: dict, random: random.Random, what: str, rank: int | None = None, **more: object) -> int:
    """An event at any step. Returns its rank."""
    rank = random.randrange(plan["ranks"]) if rank is None else rank
    at = random.randrange(len(plan["steps"]))
    plan["events"].append({"what": what, "at": at, "rank": rank, **more})
    return rank


def _knob(random: random.Random, checksum: bool) -> str:
    knobs = KNOBS + WITH_CHECKSUM if checksum else KNOBS
    return random.choice(knobs).format(
        chance=random.choice([20, 50, 100, 200]), few=random.randint(1, 5), some=random.randint(1, 40)
    )


def _disturb(plan: dict, random: random.Random, cables: int) -> None:
    """What the ranks survive, and their results with them."""
    for rank in range(plan["ranks"]):
        if random.random() < 0.4:
            checksum = plan["environment"]["MLXDIST_CHECKSUM"] == "1"
            _add(plan, random, "inject", rank, faults=_knob(random, checksum))
    if random.random() < 0.3:
        _add(plan, random, "stop", delay=random.uniform(0, 0.01), seconds=random.choice([0.01, 0.1, 0.5]))
    if random.random() < 0.2:
        cable = random.choice(["", *(f"{cable}:" for cable in range(cables) if cables > 1)])
        for rank in random.choice([[0], range(plan["ranks"])]):
            _add(plan, random, "inject", rank, faults=f"{cable}link=down", seconds=random.choice([0.02, 0.2, 0.6]),
                 then=f"{cable}link=up")  # fmt: skip
    elif cables > 1 and random.random() < 0.4:
        for cable in random.sample(range(cables), random.randint(1, cables - 1)):
            for rank in random.choice([[0], range(plan["ranks"])]):
                _add(plan, random, "inject", rank, faults=f"{cable}:drop=1/1")
        plan["wears"] = True


def _kill(plan: dict, random: random.Random) -> None:
    """One rank, or all but one."""
    victims = random.choice([[random.randrange(plan["ranks"])]] * 3 + [list(range(1, plan["ranks"]))])
    for rank in victims:
        _add(plan, random, "kill", rank, delay=random.uniform(0, 0.01))
    plan["ends"] = {"classes": ["PeerLost"], "texts": [f"rank {rank}" for rank in victims]}


def _die(plan: dict, random: random.Random) -> None:
    rank = _add(plan, random, "die", faults=f"die_after={random.choice([1, 1, 2, 5, 20, 50])}")
    plan["ends"] = {"classes": ["PeerLost"], "texts": [f"rank {rank}"], "maybe": True}


def _abort(plan: dict, random: random.Random) -> None:
    reason = f"chaos {random.randrange(10**6)}"
    rank = _add(plan, random, "abort", reason=reason)
    plan["ends"] = {"classes": ["Aborted"], "texts": [f"rank {rank} on"], "all": reason}


def _differ(plan: dict, random: random.Random) -> None:
    """One rank has another shape, in an operation of the world that has one.

    Not in all_to_all_v: where its counts happen to fit another rank's, that one receives what it was sent.
    """
    without = ("split", "burst", "barrier", "all_to_all_v")
    candidates = [i for i, step in enumerate(plan["steps"]) if step["do"] not in without]
    candidates = [i for i in candidates if plan["steps"][i]["group"] == 0]
    if not candidates:
        return
    rank = random.randrange(plan["ranks"])
    plan["events"].append({"what": "differ", "at": random.choice(candidates), "rank": rank})
    plan["ends"] = {"classes": ["Mismatch"], "texts": ["ranks disagree"]}


def _silence(plan: dict, random: random.Random) -> None:
    """One rank is stopped for longer than the others wait, or nothing that it sends arrives."""
    rank, stops = random.randrange(plan["ranks"]), random.random() < 0.5
    if stops:
        _add(plan, random, "stop", rank, delay=random.uniform(0, 0.01), seconds=IMPATIENT + 2)
    else:
        _add(plan, random, "inject", rank, faults="drop=1/1")
    # Whom a rank waits for may itself wait for that one.
    plan["ends"] = {"classes": ["Timeout"], "texts": ["waited"], "maybe": stops}
