"""`mlxdist.serve.Server` in a program: answers in a thread, its end on all ranks, and options that are wrong.

Arguments: a model folder of tests/support/serving.py.
"""

import json
import sys
import urllib.error
import urllib.request

from mlx_lm import generate, load

import mlxdist
from mlxdist.serve import HttpOptions, ServeOptions, Server

folder = sys.argv[1]
group = mlxdist.init()


def text_of(address: str, prompt: str) -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": 12}).encode()
    with urllib.request.urlopen(f"{address}/v1/completions", body, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


wrong = ServeOptions(folder, http=HttpOptions(port=0), adapters=(("one", "first"),), adapter_path="second")
for serve in (Server(wrong).run, Server(wrong).__enter__):
    try:
        serve()
    except mlxdist.InvalidArgument as error:
        assert "--adapter-path is for all requests" in str(error), error
    else:
        raise AssertionError("the options do not go together")

expected = None
for _ in range(2):  # a program may have one after the other
    server = Server(ServeOptions(folder, http=HttpOptions(port=0)))
    assert server.address == ""
    with server:
        assert bool(server.address) == (group.rank() == 0)
        if address := server.address:
            expected = expected or generate(*load(folder), "A question", max_tokens=12)
            assert text_of(address, "A question").rstrip("\ufffd") == expected.rstrip("\ufffd")
    server.close()  # a second time
    if group.rank() == 0:
        try:
            text_of(address, "A question")
        except urllib.error.URLError:
            pass
        else:
            raise AssertionError("the server answers after its end")
group.barrier()  # the group is the program's again
