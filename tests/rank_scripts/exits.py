"""One rank of test_finalize.py: a rank leaves its program by an exit, while others communicate.

Arguments: how, and the rank.
"""

import _thread
import atexit
import os
import sys
import threading
import time

import numpy as np

import mlxdist

group = mlxdist.init()
how, leaves = sys.argv[1], group.rank() == int(sys.argv[2])


class Quit(SystemExit):
    pass


def leave() -> None:
    if how == "sys.exit":
        sys.exit(7)
    elif how == "exit":
        exit(7)
    elif how == "raise":
        raise SystemExit(7)
    elif how == "class":
        raise Quit(7)
    elif how == "late":
        try:
            raise SystemExit(7)
        except BaseException:
            time.sleep(0.5)
            raise
    elif how == "kept":
        try:
            raise SystemExit(7)
        except BaseException as error:
            error.args = (error,)  # it keeps itself, as with asyncio.run
            raise
    elif how == "finally":
        try:
            raise SystemExit(7)
        finally:
            group.finalize()
    elif how == "handler":
        atexit.register(group.finalize)
        raise SystemExit(7)
    elif how == "text":
        sys.exit("out of data")
    elif how == "after a failure":
        try:
            mlxdist.all_sum(np.ones(3, np.float32))
        except mlxdist.Mismatch:
            sys.exit(7)


def catch() -> None:
    """Exits that do not end the program."""
    try:
        raise SystemExit(7)
    except SystemExit as error:
        assert error.code == 7
    _thread.start_new_thread(sys.exit, (7,))
    thread = threading.Thread(target=sys.exit, args=(7,))
    thread.start()
    thread.join()
    if (child := os.fork()) == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    sys.unraisablehook = lambda ignored: None  # it prints what an exit handler raises
    atexit.register(sys.exit, 7)


if how == "caught":
    if leaves:
        catch()
    total = mlxdist.all_sum(np.ones(3, np.float32))
    print("sum", total[0])
    sys.exit()
for _ in range(20):
    mlxdist.all_sum(np.ones(10, np.float32))
if leaves:
    leave()
while True:
    mlxdist.all_sum(np.ones(10, np.float32))
