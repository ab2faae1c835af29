"""One rank of the chaos test: carries out rounds that come as lines of JSON, and says as lines of JSON how each ended.

round   {"round": round}        a round of tests/chaos/plan.py
        {"at": step}            the rank comes to a step at which something happens from outside
        {"done": true}          all results were right
        {"wrong": text}         one was not
        {"error": class, "ours": whether it is an mlxdist.Error, "text": ..., "again": [class, text, seconds]}
                                "again": what one more operation raised, and how soon
probe   {"probe": true}         one operation of all ranks; answers as a round does
end     {"end": true}           finalize, and the end of the process
"""

import faulthandler
import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from programs import carry_out, world

import mlxdist
from mlxdist.runtime.group.group import engine_of
from mlxdist.runtime.native import check, lib

faulthandler.register(signal.SIGUSR1)  # what hangs is asked where
timers: list[threading.Timer] = []


def say(**news: object) -> None:
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


def inject(faults: str, seed: int = 0) -> None:
    check(lib.mlxdist_group_inject_faults(engine_of(world).native, faults.encode()))
    if seed:
        check(lib.mlxdist_group_inject_faults(engine_of(world).native, f"seed={seed}".encode()))


def play(plan: dict) -> None:
    inject("none")
    mlxdist.barrier()

    def before(number: int, step: dict) -> None:
        for event in plan["events"]:
            if event["at"] != number or event["rank"] != world.rank():
                continue
            if event["what"] in ("inject", "die"):
                inject(event["faults"], plan["seed"] % 2**32)
                if "then" in event:
                    timers.append(threading.Timer(event["seconds"], inject, [event["then"]]))
                    timers[-1].start()
            elif event["what"] == "abort":
                world.abort(event["reason"])
            elif event["what"] == "differ":
                step["rows"] += 1
            else:
                say(at=number)

    carry_out(plan["steps"], before)
    mlxdist.barrier()


def outcome(function: Callable[[], object]) -> dict:
    try:
        function()
    except AssertionError:
        return {"wrong": traceback.format_exc()}
    except Exception as error:
        return {"error": type(error).__name__, "ours": isinstance(error, mlxdist.Error), "text": str(error)}
    return {"done": True}


def again() -> list:
    begun = time.monotonic()
    ended = outcome(mlxdist.barrier)
    return [ended.get("error"), ended.get("text"), time.monotonic() - begun]


def main() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        if "end" in command:
            break
        ended = outcome(mlxdist.barrier if "probe" in command else lambda: play(command["round"]))
        if "error" in ended:
            ended["again"] = again()
        say(**ended)
    for timer in timers:
        timer.cancel()
        timer.join()
    world.finalize()


main()
