"""`mlxdist bench suite`, report and compare: what they check, write and refuse. No test looks at the times."""

import copy
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from softverbs_library import LIBRARY, linux
from test_bench import bench, require_times

import mlxdist
from mlxdist.tools.bench.bandwidth import least_copies
from mlxdist.tools.bench.compare import compared
from mlxdist.tools.bench.limits import LIMIT_COLUMNS, LIMITS, limit_cells
from mlxdist.tools.bench.operations import Inputs
from mlxdist.tools.bench.results import failed, load, notes
from mlxdist.tools.bench.suite import MEASURED, Suite, plan
from mlxdist.tools.bench.suite_ways import Way, collective, exactly
from mlxdist.tools.bench.timing import CORES
from mlxdist.tools.bench.workload import OURS

SMALL = ["--quick", "--only", "sendrecv,all_reduce,broadcast,ep_transport", "--backends", "mlxdist,ring,jaccl"]
VOID = {"meta", "!doctype", "br", "link"}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The directory with the results and the report of one small run."""
    directory = tmp_path_factory.mktemp("suite")
    bench("suite", *SMALL, "--output", str(directory / "a.json"), "--html", str(directory / "a.html"))
    return directory


@pytest.fixture
def results(run) -> dict:
    return load(run / "a.json")


def test_every_case_is_measured_and_verified(results):
    setup = results["setup"]
    assert (setup["ranks"], setup["warm_up"], setup["iterations"], len(setup["machines"])) == (2, 2, 5, 2)
    measured = {
        (r["variant"], r["case"]["operation"], r["case"]["dtype"], r["case"].get("tokens") or r["case"]["bytes"])
        for r in results["cases"]
    }
    sizes = (4 << 10, 256 << 10)
    sized = {(o, d) for o, d in (("sendrecv", "float32"), ("all_reduce", "float16"), ("all_reduce", "float32"))}
    both = {(backend, o, d, size) for backend in ("mlxdist", "ring") for o, d in sized for size in sizes}
    ours = {("mlxdist", "broadcast", "float32", size) for size in sizes} | {("mlxdist", "ep_transport", "float16", 16)}
    assert measured == both | ours
    for result in results["cases"]:
        require_times(result["microseconds"])
        assert (result["wrong"], result["refused"]) == (0, None)
        assert result["microseconds"]["count"] == 5
        if "bytes" in result["case"]:
            speed = result["case"]["bytes"] / result["microseconds"]["median"] / 1e3
            assert result["algbw"] == pytest.approx(speed)


def test_limits_of_the_machine_are_measured_with_what_moves_bytes(run, results):
    for result in results["cases"]:
        for name in LIMITS if len(CORES) > 1 else ["memcpy"]:
            require_times(result[name])
        assert all(limit_cells(result)) or len(CORES) == 1
    text = (run / "a.html").read_text()
    assert all(f"<th>mlxdist {column}</th>" in text and f"<li>{column}: " in text for column in LIMIT_COLUMNS)


def test_what_is_not_there_is_reported(results):
    assert [entry["variant"] for entry in results["absent"] if "case" not in entry] == ["jaccl"]
    why = {(e["variant"], e["case"]["operation"]): e["absent"] for e in results["absent"] if "case" in e}
    assert why == {
        ("ring", "broadcast"): "mx.distributed has no broadcast",
        ("ring", "ep_transport"): "mx.distributed has no all_to_all",
    }
    text = "\n".join(notes(results))
    assert "jaccl was not measured" in text and "ring has no broadcast: mx.distributed has no broadcast" in text


def test_what_is_needed_to_repeat_it(results):
    setup = results["setup"]
    assert "bench suite --quick --only" in setup["command"] and setup["provider"].startswith("soft: ")
    assert {"begun", "revision", "seconds", "foreign_cpu_share", "hosts", "environment", "pinned"} <= set(setup)
    for machine in setup["machines"]:
        assert {"system", "release", "cpu", "cores", "memory", "python", "mlx", "numpy", "clock"} <= set(machine)
        assert machine["environment"]["OMP_NUM_THREADS"] == "1"
        assert "MLXDIST_SECRET" not in machine["environment"]


class Page(HTMLParser):
    """Tags that are not closed in their order, and what a page must not fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.seen, self.names, self.outside = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.names += [value for name, value in attributes if name == "id"]
        self.outside += [v for name, v in attributes if name in ("src", "href", "xlink:href") and not v.startswith("#")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()


def test_the_report_is_one_page_that_needs_nothing_else(run, results):
    text = (run / "a.html").read_text()
    page = Page(text)
    assert page.open == [] and page.outside == []
    assert page.seen.count("svg") == 5  # four curves, and the layer
    assert len(set(page.names)) == len(page.names)
    assert page.seen.count("tr") == 1 + len({str(result["case"]) for result in results["cases"]})
    assert "currentColor" in text and "color-scheme: light dark" in text


@pytest.mark.parametrize("times", [(2.0, 250_000.0), (20.0, 45.0)], ids=["decades", "within a decade"])
def test_numbers_on_axes_are_plain_text(times, tmp_path):
    """matplotlib writes powers of 10 as TeX, which is shown as it stands where it is not parsed."""
    matplotlib = pytest.importorskip("matplotlib")
    from mlxdist.tools.bench.plots import curves, draw_tokens

    def results(**fields: object) -> dict:
        cases = [
            {"case": {"operation": "all_reduce"} | {n: v[number] for n, v in fields.items()}, "variant": "ring"}
            | {"microseconds": dict.fromkeys(("median", "min", "max"), time), "described": "a layer"}
            for number, time in enumerate(times)
        ]
        return {"cases": cases, "setup": {"ranks": 2, "provider": "soft"}}

    (curve,) = curves(results(dtype=["float32"] * 2, bytes=[4096, 8192]))
    with matplotlib.rc_context({"text.parse_math": False, "svg.fonttype": "none"}):
        draw_tokens(results(tokens=[1, 2]), {}, {}, tmp_path / "a.svg")
    for picture in (curve, (tmp_path / "a.svg").read_text()):
        shown = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
        assert shown and not [text for text in shown if "$" in text or "\\" in text]
        assert ("100000" if times[1] > 1e5 else "30") in shown, shown


def test_the_text_of_a_file_is_escaped(run, results, tmp_path):
    results["setup"]["command"] = results["setup"]["hosts"][0]["name"] = "<script>alert(1)</script>"
    results["cases"][0]["case"]["operation"] = "<b>$x^$</b>"
    results["cases"] = results["cases"][:2]
    results["cases"][1] |= {"refused": "<i>wrong", "microseconds": None}
    (tmp_path / "a.json").write_text(json.dumps(results))
    bench("report", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"))
    text = (tmp_path / "a.html").read_text()
    assert not {"script", "b", "i"} & set(Page(text).seen)
    assert "&lt;script&gt;" in text and "REFUSED" in text


def test_a_result_is_like_itself(run):
    found = json.loads(bench("compare", *[str(run / "a.json")] * 2, "--max-slowdown", "1.01", "--json").stdout)
    assert found["comparable"] and found["failed"] == [] and found["other"] == []
    assert {case["verdict"] for case in found["cases"]} == {"alike"}
    assert all(case["ratio"] == 1 for case in found["cases"])


def slowed(results: dict, number: int, times: float) -> dict:
    """A copy in which one case takes N times as long."""
    made = copy.deepcopy(results)
    taken = made["cases"][number]["microseconds"]
    made["cases"][number]["microseconds"] = {n: v if n == "count" else v * times for n, v in taken.items()}
    return made


@pytest.fixture
def steady(results) -> dict:
    """With spreads of 10 %, whatever the machine did."""
    for case in results["cases"]:
        median = case["microseconds"]["median"]
        spread = {"p10": 0.95, "p90": 1.05, "p99": 1.1, "min": 0.9, "max": 1.1, "median": 1.0}
        case["microseconds"] = {name: median * factor for name, factor in spread.items()}
    return results


def test_what_differs_by_more_than_its_spread(steady):
    def verdict(times: float) -> tuple:
        cases = compared(steady, slowed(steady, 3, times))["cases"]
        assert {case["verdict"] for number, case in enumerate(cases) if number != 3} == {"alike"}
        return cases[3]["verdict"], cases[3]["ratio"]

    assert verdict(1.09) == ("alike", pytest.approx(1.09))
    assert verdict(1.5) == ("slower", pytest.approx(1.5))
    assert verdict(0.5) == ("faster", pytest.approx(0.5))


def test_a_slower_case_fails_in_ci(steady, tmp_path):
    for name, times in (("a", 1.0), ("b", 1.3)):
        (tmp_path / f"{name}.json").write_text(json.dumps(slowed(steady, 0, times)))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert "1 slower" in bench("compare", *files).stdout
    assert "1 slower" in bench("compare", *files, "--max-slowdown", "1.4").stdout
    assert (
        "FAILED: sendrecv float32, 4 KiB by mlxdist: takes 1.30"
        in bench("compare", *files, "--max-slowdown", "1.2", status=1).stdout
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": 4}, "NOT COMPARABLE: ranks: 2 and 4"),
        ({"provider": "ibverbs: a device"}, "NOT COMPARABLE: provider: soft and ibverbs"),
        ({"hosts": [{"name": "node0", "ips": ["192.0.2.1"]}]}, "COMPARABLE: hosts: localhost and node0 (192.0.2.1)"),
        ({"mlxdist": "9.9"}, "Also not the same: mlxdist"),
    ],
)
def test_what_cannot_be_compared(run, results, change, words, tmp_path):
    results["setup"] |= change
    (tmp_path / "b.json").write_text(json.dumps(results))
    files = [str(run / "a.json"), str(tmp_path / "b.json")]
    printed = bench("compare", *files, "--max-slowdown", "9", status=1 if "COMPARABLE" in words else 0).stdout
    assert words in printed


def test_a_missing_case_fails_in_ci(run, results, tmp_path):
    del results["cases"][0]
    (tmp_path / "b.json").write_text(json.dumps(results))
    printed = bench("compare", str(run / "a.json"), str(tmp_path / "b.json"), "--max-slowdown", "9", status=1).stdout
    assert "present in A, missing in B" in printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1"),
        ("[]", 'no "benchmark" in it'),
        ('{"schema": 2}', 'no "benchmark" in it'),
        ('{"benchmark": "suite", "schema": 1}', "its schema is 1"),
        ('{"benchmark": "suite", "schema": 2}', "is missing"),
        ("[" * 100_000, "is not what mlxdist bench --output writes"),
    ],
)
def test_other_files_are_rejected(text, words, tmp_path):
    (tmp_path / "a.json").write_text(text)
    assert words in bench("compare", *[str(tmp_path / "a.json")] * 2, status=1).stderr


@pytest.mark.parametrize(
    "spoil",
    [
        lambda case: case.pop("case"),
        lambda case: case["case"].update(bytes=0),
        lambda case: case["case"].update(bytes=[]),
        lambda case: case.update(microseconds=None),
        lambda case: case["microseconds"].update(median=-1.0),
        lambda case: case["microseconds"].update(p99="fast"),
        lambda case: case.update(variant=["mlxdist"]),
        lambda case: case.update(transfer={"median": 0}),
        lambda case: case.update(memcpy=1.0),
        lambda case: case.update(path=["TCP"]),
    ],
)
def test_malformed_cases_are_rejected(results, spoil, tmp_path):
    spoil(results["cases"][1])
    (tmp_path / "a.json").write_text(json.dumps(results))
    assert "case 1 is malformed" in bench("compare", *[str(tmp_path / "a.json")] * 2, status=1).stderr


def test_a_time_that_is_no_number_is_rejected(results, tmp_path):
    results["cases"][1]["microseconds"]["median"] = float("nan")
    (tmp_path / "a.json").write_text(json.dumps(results, indent=1))
    text = (tmp_path / "a.json").read_text()
    line = 1 + text.count("\n", 0, text.index("NaN"))
    printed = bench("compare", *[str(tmp_path / "a.json")] * 2, status=1).stderr
    assert f"NaN is not a number of JSON (line {line}, column" in printed


CASE = {"operation": "all_reduce", "dtype": "float32", "bytes": 4000}


def alone() -> tuple[Suite, Inputs]:
    """In a group of one."""
    parameters = {"quick": True, "warm_up": 0, "iterations": 3, "device": "cpu", "backends": [OURS]}
    return Suite(mlxdist.init(), parameters), Inputs("float32", 1000, 1)


def test_wrong_data_is_rejected():
    """In the last of three calls, one element."""
    suite, data = alone()
    good = collective("all_reduce", data, suite.world, OURS, suite.world)
    calls = []

    def start():
        calls.append(good._start())
        return calls[-1] if len(calls) < 3 else [calls[-1][0].at[7].add(1)]

    ways = {OURS: good, "broken": Way(start, lambda result: exactly(data[0], result))}
    fine, broken = suite._time(CASE, ways, 0, moved=4000)
    assert (fine["wrong"], fine["refused"]) == (0, None) and fine["microseconds"]["count"] == 3
    assert (broken["wrong"], broken["microseconds"]) == (1, None)
    assert "1 elements" in broken["refused"]
    assert failed({"cases": [fine, broken]}) and not failed({"cases": [fine]})
    assert failed({"cases": []})  # nothing was measured


def test_impossible_times_are_rejected():
    suite, data = alone()
    ways = {OURS: collective("all_reduce", data, suite.world, OURS, suite.world)}
    (result,) = suite._time(CASE, ways, 1e9 * least_copies("all_sum", 2), moved=4000)
    assert "so this is no result" in result["refused"]
    assert (result["microseconds"], result["wrong"]) == (None, 0)


def test_a_result_of_another_shape_is_wrong():
    expected = np.zeros(4, np.float32)
    assert exactly(expected, mlxdist.all_sum(np_to_mlx(np.zeros(3, np.float32)))) > 0


def np_to_mlx(array):
    import mlx.core as mx

    return mx.array(array)


def test_the_plan():
    lines = plan(list(MEASURED), [4096, 16384], 2, tokens=[16, 512])
    assert [line["operation"] for line in lines if line.get("dtype") == "float16"] == ["all_reduce"] * 2
    assert [(line["tokens"], line["hidden"]) for line in lines if line["operation"] == "ep_transport"] == [
        (16, 2048),
        (512, 2048),
    ]
    assert {line["hidden"] for line in plan(list(MEASURED), [4096], 2, [16], hidden=96) if "hidden" in line} == {96}
    assert len(lines) == 2 * 12 + 1 + 2 * 2 + 2  # operations on arrays, the barrier, layers of experts, others
    sizes = {line["operation"]: line["bytes"] for line in plan(["all_reduce", "all_gather"], [4096], 3, tokens=[])}
    assert (sizes["all_reduce"], sizes["all_gather"]) == (4096, 4092)  # all_gather has a part of each rank


@pytest.mark.long
def test_operations_of_a_root_and_unequal_parts(tmp_path):
    """Three ranks: the parts of all_to_all_v are unequal from there on. The tables by size need three sizes."""
    only = ["all_max", "reduce", "gather", "scatter", "all_to_all_v"]
    words = ["-n", "3", "--quick", "--no-pin", "--backends", "mlxdist,ring", "--sizes", "1200,12KiB,120KiB"]
    words += ["--only", ",".join([*only, "barrier"]), "--output", str(tmp_path / "a.json")]
    printed = bench("suite", *words, "--html", str(tmp_path / "a.html")).stdout
    found = load(tmp_path / "a.json")
    ours = [result for result in found["cases"] if result["variant"] == OURS]
    sizes = [1200, 12 << 10, 120 << 10]
    assert [tuple(result["case"].values()) for result in ours] == [
        *((name, "float32", size) for name in only for size in sizes),
        ("barrier",),
    ]
    for result in found["cases"]:
        require_times(result["microseconds"])
        assert (result["wrong"], result["refused"]) == (0, None)
    assert {e["case"]["operation"] for e in found["absent"]} == {*only[1:], "barrier"}
    assert {(r["variant"], r["path"]) for r in found["cases"] if "bytes" in r["case"]} == {
        (OURS, "shared memory"),
        ("ring", None),
    }
    fitted = {(one["operation"], one["variant"]): one for one in found["fits"]}
    assert list(fitted) == [("all_max", OURS), ("all_max", "ring"), *((name, OURS) for name in only[1:])]
    for (_, variant), one in fitted.items():
        assert (one["sizes"], one["path"]) == (3, "shared memory" if variant == OURS else None)
        assert one["saturation_bytes"] in sizes and one["algbw"] > 0
    assert "n_1/2" in printed and "Hockney 1994" in printed and printed.count("all_to_all_v float32") == 4
    text = (tmp_path / "a.html").read_text()
    assert "<th>n_1/2</th>" in text and Page(text).seen.count("tr") == 1 + 16 + 1 + len(fitted)


@pytest.mark.long
@linux
def test_each_provider_has_a_variant(tmp_path, monkeypatch):
    """RDMA is that of libsoftverbs. librdma is macOS's: the run goes on without it, and says so."""
    (tmp_path / "libibverbs.so.1").symlink_to(LIBRARY)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("MLXDIST_DEVICE_MAP", '[[null, "soft0"], ["soft0", null]]')
    words = ["--providers", "shm,tcp,ibverbs,librdma", "--backends", "mlxdist,ring", "--only", "sendrecv", "--quick"]
    found = json.loads(bench("suite", *words, "--sizes", "4KiB,64KiB,256KiB", "--json").stdout)
    assert not failed(found)
    assert {(one["variant"], one["path"]) for one in found["fits"]} == {
        ("mlxdist shm", "shared memory"),
        ("mlxdist tcp", "TCP"),
        ("mlxdist ibverbs", "RDMA"),
        ("ring", None),
    }
    assert [entry["variant"] for entry in found["absent"]] == ["mlxdist librdma"]
    assert found["setup"]["provider"].startswith("shm, tcp, ibverbs, librdma: ")


def test_tokens_and_hidden_of_layers_of_experts(tmp_path):
    words = ["--quick", "--backends", "mlxdist", "--only", "ep_transport", "--tokens", "3,5", "--hidden", "96"]
    output = tmp_path / "a.json"
    printed = bench("suite", *words, "--output", str(output)).stdout
    results = load(output)
    cases = [result["case"] for result in results["cases"]]
    assert cases == [
        {"operation": "ep_transport", "tokens": tokens, "hidden": 96, "dtype": "float16"} for tokens in (3, 5)
    ]
    assert not failed(results) and results["fits"] == []
    assert "ep_transport float16, 3 tokens, hidden 96" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "all_som"], "'all_som' is not one of sendrecv"),
        (["--backends", "gloo"], "'gloo' is not one of mlxdist, ring, mpi, jaccl"),
        (["--providers", "rdma"], "'rdma' is not one of shm, tcp, ibverbs, librdma"),
        (["--providers", "shm", "--backends", "ring"], "the backends are ring, without mlxdist"),
        (["--tokens", "16,0"], "'0' is not a number from 1 to 65536"),
        (["--tokens", "many"], "'many' is not a number"),
        (["--hidden", "16"], "16 is not in the range 32<=x<=65536"),
        (["-n", "1"], "1 rank in all; this needs 2 to 256"),
        (["--sizes", "3"], "sendrecv of float32 on 2 ranks has no size of 3 B, only multiples of 4 B; write 4"),
        (["--sizes", "4KiB,6", "--only", "all_reduce"], "all_reduce of float32 on 2 ranks has no size of 6 B"),
        (["--sizes", "4", "--only", "reduce_scatter"], "only multiples of 8 B; write 8"),
        (["-n", "2", "--html", "/no/such/directory/a.html"], "there is no directory /no/such/directory"),
        (["--hosts", "a,b", "--hostfile", "c"], "Give --hostfile or --hosts, not both"),
    ],
)
def test_rejects(arguments, words):
    assert words in " ".join(bench("suite", *arguments, status=2).stderr.split())


def test_without_matplotlib(run, tmp_path):
    program = "import sys; sys.modules['matplotlib'] = None; from mlxdist.cli import main; main()"
    words = [sys.executable, "-c", program, "bench", "report", str(run / "a.json"), "--html", str(tmp_path / "a.html")]
    finished = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 1 and "pip install 'mlxdist[bench]'" in finished.stderr


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_of_it(ranks):
    """Three: one has no partner, nothing divides by them, and mlx-lm's layers cannot be cut."""
    pytest.importorskip("mlx_lm")
    found = json.loads(bench("suite", "--quick", "-n", str(ranks), "--json").stdout)
    measured = {r["case"]["operation"] for r in found["cases"] if r["variant"] == "mlxdist"}
    absent = {e["case"]["operation"] for e in found["absent"] if e["variant"] == "mlxdist"}
    assert measured | absent == set(MEASURED)
    assert not any(result["wrong"] or result["refused"] for result in found["cases"])
    assert ("tp_decode" in measured) == (ranks == 2)
