"""`mlxdist bench compare`: two results of a benchmark case by case, with what differs by more than its spread."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from mlxdist.base.user_path import UserPath

from .results import case_name, hosts_of, key, load, results_console, spread, table_of

__all__ = ["compare", "compared", "differences"]

_FILE = UserPath(dir_okay=False, path_type=Path)
# Of the setup: what must be the same for times to answer a question, and what is only to be known.
_NEEDED = ("ranks", "provider", "device", "pinned")
_KNOWN = ("mlxdist", "mlx", "python", "revision", "iterations", "repeats", "environment")


@click.command()
@click.argument("before", metavar="A.json", type=_FILE)
@click.argument("after", metavar="B.json", type=_FILE)
@click.option(
    "--max-slowdown",
    type=click.FloatRange(1, min_open=True),
    metavar="TIMES",
    help="Exit with status 1 if a case of B takes more than TIMES as long as in A.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare(before: Path, after: Path, max_slowdown: float | None, as_json: bool) -> None:
    """Compare two results of the same benchmark, as --output has written them, case by case.

    \b
        mlxdist bench compare yesterday.json today.json --max-slowdown 1.2

    B/A below 1 is faster. Two cases differ where the middle 80 % of their times do not overlap; what does overlap is
    noise, whatever the ratio of the medians.

    With --max-slowdown the exit status is 1 if a case of B differs and takes more than TIMES as long as in A, is
    refused or missing in B, or if A and B have been measured in ways that cannot be compared. Without it, it is 0.
    """
    a, b = load(before), load(after)
    found = compared(a, b)
    found["failed"] = _failures(found, max_slowdown) if max_slowdown else []
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print(found)
    sys.exit(1 if found["failed"] else 0)


def compared(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """{"comparable", "why_not", "other": what else is not the same, "cases": those of A, then what only B has}."""
    why_not, other = differences(a["setup"], b["setup"])
    if a["benchmark"] != b["benchmark"]:
        why_not.append(f"benchmark: {a['benchmark']} and {b['benchmark']}")
    of_a, of_b = ({key(result): result for result in results["cases"]} for results in (a, b))
    cases = [_compare(of_a.get(which), of_b.get(which)) for which in dict.fromkeys([*of_a, *of_b])]
    return {"comparable": not why_not, "why_not": why_not, "other": other, "cases": cases}


def differences(a: dict[str, Any], b: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns how two setups differ: the differences that forbid a comparison, and all others."""
    facts = [_facts(setup) for setup in (a, b)]
    found: tuple[list[str], list[str]] = [], []
    for name in facts[0]:
        one, two = (fact[name] for fact in facts)
        if one != two:
            words = "" if name == "environment" else f": {one} and {two}"
            found[name not in (*_NEEDED, "hosts", "cpu")].append(f"{name}{words}")
    return found


def _facts(setup: dict[str, Any]) -> dict[str, Any]:
    facts = {name: setup.get(name) for name in (*_NEEDED, *_KNOWN)}
    facts["provider"] = setup["provider"].partition(":")[0]  # what follows says why
    facts["hosts"] = hosts_of({"setup": setup})
    facts["cpu"] = ", ".join(sorted({str(machine.get("cpu")) for machine in setup["machines"]}))
    systems = {f"{machine.get('system')} {machine.get('release')}" for machine in setup["machines"]}
    return facts | {"system": ", ".join(sorted(systems))}


def _compare(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any]:
    either: dict[str, Any] = a or b or {}
    found = {"name": case_name(either["case"]), "variant": either["variant"], "case": either["case"]}
    one, two = (side["microseconds"] if side else None for side in (a, b))
    found |= {"a": one, "b": two, "ratio": None, "low": None, "high": None}
    if one is None or two is None:
        states = ("missing" if side is None else "refused" if side["refused"] else "present" for side in (a, b))
        return found | {"verdict": "{} in A, {} in B".format(*states)}
    overlap = one["p10"] <= two["p90"] and two["p10"] <= one["p90"]
    verdict = "alike" if overlap else "slower" if two["median"] > one["median"] else "faster"
    ratio = two["median"] / one["median"]
    return found | {"ratio": ratio, "low": two["p10"] / one["p90"], "high": two["p90"] / one["p10"], "verdict": verdict}


def _failures(found: dict[str, Any], limit: float) -> list[str]:
    failures = [f"not comparable: {why}" for why in found["why_not"]]
    for case in found["cases"]:
        where = f"{case['name']} by {case['variant']}"
        if case["b"] is None:
            failures.append(f"{where}: {case['verdict']}")
        elif case["verdict"] == "slower" and case["ratio"] > limit:
            failures.append(f"{where}: takes {case['ratio']:.2f} times as long")
    return failures


def _print(found: dict[str, Any]) -> None:
    console = results_console()
    rows = []
    for case in found["cases"]:
        sides = [spread(times) if times else "" for times in (case["a"], case["b"])]
        ratio = f"{case['ratio']:.2f} [{case['low']:.2f}..{case['high']:.2f}]" if case["ratio"] else ""
        verdict = "" if case["verdict"] == "alike" else case["verdict"]
        rows.append([case["name"], case["variant"], *sides, ratio, verdict])
    title = "microseconds: median [range]; B/A with the range that the middle 80 % of both allow"
    console.print(table_of(title, ["case", "variant", "A", "B", "B/A", ""], rows, left=2))
    counted = {word: sum(case["verdict"] == word for case in found["cases"]) for word in ("alike", "faster", "slower")}
    lines = [f"{counted['alike']} alike, {counted['faster']} faster and {counted['slower']} slower in B."]
    lines += [f"Also not the same: {text}" for text in found["other"]]
    lines += [f"NOT COMPARABLE: {why}" for why in found["why_not"]]
    lines += [f"FAILED: {failure}" for failure in found["failed"]]
    for line in lines:
        console.print(line, markup=False, highlight=False)
