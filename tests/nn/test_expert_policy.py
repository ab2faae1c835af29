"""The policy of the exchange: the bytes of its model, choices that all ranks share, no wavering, and what it prints."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxdist
from mlxdist.nn.expert_parallel.policy import COLLECTIVES, MODES, Cost, LinkCosts, Policy, Workload


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (1, 2, 4))])
def test_ranks_measure_and_choose_alike(run_ranks, ranks):
    """However their clocks run. And the model's bytes are those that the engine counts."""
    assert all("alike" in output for output in run_ranks("expert_policy.py", ranks))


def link(ranks: int = 2, latency: float = 1e-5, bandwidth: float = 1e9, plan: float = 1e-4) -> LinkCosts:
    return LinkCosts("soft", ranks, dict.fromkeys(COLLECTIVES, Cost(latency, bandwidth)), plan)


def test_formulas_by_hand():
    """4 ranks, 100 tokens of 10 elements of 2 bytes, 2 experts: B = 2000; 1 GB/s, so a byte is a nanosecond."""
    between = link(ranks=4)
    own, same = Workload(2, 10, 2, sharded=True), Workload(2, 10, 2, sharded=False)
    exchanged = 25 * (2 * 3 * (1 - 0.75**2) * 20 + 2 * 0.75 * 4) / 1000  # of each of 25 tokens: rows, weights
    microseconds = {
        (own, "replicated"): 20 + 3 * 1.5,
        (own, "gather"): 20 + 2 * 1.5,
        (own, "dispatch"): 100 + 30 + exchanged,
        (same, "replicated"): 10 + 2 * 1.5,
        (same, "gather"): 20 + 2 * 1.5,
        (same, "dispatch"): 40 + exchanged + 1.5,
    }
    for (workload, mode), expected in microseconds.items():
        assert workload.seconds(mode, 100, between) * 1e6 == pytest.approx(expected), (workload, mode)
    assert own.seconds("dispatch", 100, link(ranks=1)) == 0


def test_few_tokens_are_gathered_and_many_dispatched_where_ranks_are_more_than_experts_of_a_token():
    between = link(ranks=8)
    assert Policy(between).choose(8, 2, 1024, 2) == "gather"
    assert Policy(between).choose(4096, 2, 1024, 2) == "dispatch"
    assert Policy(between).choose(4096, 2, 1024, 2, sharded=False) == "dispatch"
    assert Policy(between).choose(8, 2, 1024, 2, sharded=False) == "replicated"
    policy = Policy(between)
    (one, first), (several, second) = policy.thresholds(Workload(2, 1024, 2))
    assert (one, first, second) == (1, "gather", "dispatch")
    # Of a token of 2048 bytes, gather sends 2 * 7/8, dispatch 2 * 7 (1 - (7/8)^2) / 8 and 7 / 8 bytes of weights; that
    # has to save the plan of 100 us and the latency of a third message.
    saved = 2048 * 2 * 7 / 8 * (1 - (1 - (7 / 8) ** 2)) - 7 / 8
    assert several == pytest.approx(1.1e5 / saved, abs=1)
    assert Policy(between).choose(several - 1, 2, 1024, 2) == "gather"
    assert Policy(between).choose(several, 2, 1024, 2) == "dispatch"


seconds = st.floats(1e-6, 1e-3)
bandwidths = st.floats(1e8, 1e11)
links = st.builds(
    lambda ranks, plan, costs: LinkCosts("soft", ranks, dict(zip(COLLECTIVES, costs)), plan),
    st.integers(2, 16),
    seconds,
    st.lists(st.builds(Cost, seconds, bandwidths), min_size=4, max_size=4),
)
workloads = st.builds(Workload, st.integers(1, 8), st.integers(1, 8192), st.sampled_from([1, 2, 4]), st.booleans())
token_lists = st.lists(st.integers(0, 10000), max_size=60)


def ask(policy: Policy, workload: Workload, tokens: int) -> str:
    return policy.choose(tokens, workload.top_k, workload.hidden, workload.itemsize, workload.sharded)


@settings(deadline=None)
@given(links, workloads)
def test_thresholds_are_where_the_cheapest_mode_changes(between, workload):
    found = Policy(between).thresholds(workload, up_to=5000)
    assert len({mode for _, mode in found}) == len(found) <= 3
    for tokens in {*range(1, 200), *(t + d for t, _ in found for d in (-1, 0, 1)), 4999} - {0}:
        expected = [mode for start, mode in found if start <= tokens][-1]
        least = min(workload.seconds(mode, tokens, between) for mode in MODES)
        assert workload.seconds(expected, tokens, between) == pytest.approx(least, rel=1e-12)


@settings(deadline=None)
@given(links, workloads, st.floats(0.01, 0.5), st.integers(0, 10), st.data())
def test_no_wavering_around_a_threshold(between, workload, margin, cooldown, data):
    """As long as no mode saves the margin over another one, the first choice stays, whatever comes in what order."""

    def is_near(tokens: int) -> bool:
        costs = [workload.seconds(mode, tokens, between) for mode in MODES]
        return min(costs) >= (1 - margin) * max(costs)

    near = [tokens for tokens in range(1, 400) if is_near(tokens)]
    if not near:
        return
    policy = Policy(between, margin=margin, cooldown=cooldown, urgent=3)
    calls = data.draw(st.lists(st.sampled_from(near), min_size=1, max_size=60))
    assert len({ask(policy, workload, tokens) for tokens in calls}) == 1


@settings(deadline=None)
@given(links, workloads, st.floats(0, 0.9), st.integers(0, 20), st.floats(1.1, 5), token_lists)
def test_a_change_is_worth_it_and_not_too_soon(between, workload, margin, cooldown, urgent, calls):
    policy = Policy(between, margin=margin, cooldown=cooldown, urgent=urgent)
    again = Policy(between, margin=margin, cooldown=cooldown, urgent=urgent)
    mode, since = None, cooldown
    for tokens in calls:
        best = workload.cheapest(tokens, between)
        selected = ask(policy, workload, tokens)
        assert selected == ask(again, workload, tokens)  # of the calls alone: what another rank computes
        if mode is None:
            assert selected == best
        elif selected != mode:
            old, new = (workload.seconds(name, tokens, between) for name in (mode, selected))
            assert selected == best and (new * urgent < old or (since >= cooldown and new < (1 - margin) * old))
            since = 0
        else:  # nor is it held on to what costs many times as much
            assert workload.seconds(mode, tokens, between) <= urgent * workload.seconds(best, tokens, between)
        mode = selected
        since += 1


def test_a_prefill_after_decoding_changes_at_once_and_decoding_after_it_too():
    policy = Policy(link(ranks=8), cooldown=1000)
    modes = [policy.choose(tokens, 2, 1024, 2) for tokens in (8, 8, 4096, 8, 8)]
    assert modes == ["gather", "gather", "dispatch", "gather", "gather"]


def test_cooldown_of_each_workload():
    policy = Policy(link(ranks=8), cooldown=3, urgent=1000)

    def modes(itemsize: int, *calls: int) -> list[str]:
        return [policy.choose(tokens, 2, 1024, itemsize)[0] for tokens in calls]

    assert modes(4, 4096, 8) == ["d", "g"]  # the first choice may be changed at once,
    assert modes(4, 4096, 4096) == ["g", "g"]  # the next one not for three calls
    assert modes(2, 8, 4096) == ["g", "d"]
    assert modes(4, 4096) == ["d"]
    assert modes(2, 8, 8, 8) == ["d", "d", "g"]


def test_forced():
    policy = Policy(link(ranks=8), forced="dispatch")
    assert policy.choose(1, 2, 1024, 2) == "dispatch"
    assert "forced: dispatch" in policy.table(Workload(2, 1024, 2))


def test_table():
    policy = Policy(link(ranks=8))
    assert str(policy) == "no call yet"
    policy.choose(1, 2, 1024, 2)
    policy.choose(1, 2, 1024, 2, sharded=False)
    own, same = str(policy).split("\n\n")
    assert "8 ranks, provider soft; assumed: plan 100.0 us" in own
    assert "tokens of its own on each rank" in own and "the same tokens on all ranks" in same
    rows = {line.split()[0]: line.split() for line in own.splitlines() if line.strip()[0].isdigit()}
    assert "*" in rows["1"][2] and "*" in rows["4096"][3]
    assert "cheapest: from 1 gather, from 41 dispatch; kept unless another saves 10% and 32 calls" in own


@pytest.mark.parametrize("provider", ["soft", "librdma", "ibverbs", "none"])
def test_assumptions_for_every_provider(provider):
    assumed = LinkCosts.assumed(provider, 2)
    assert set(assumed.costs) == set(COLLECTIVES) and not assumed.measured
    both = LinkCosts.assumed(f"soft+{provider}", 2)  # as slow as the slower one
    assert both.costs["all_sum"].latency >= assumed.costs["all_sum"].latency


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Policy(link()).choose(-1, 2, 8, 4), "tokens must be at least 0, not -1"),
        (lambda: Policy(link()).choose(1, 0, 8, 4), "top_k, hidden and itemsize must be at least 1"),
        (lambda: Policy(link(), margin=1), "margin (1)"),
        (lambda: Policy(link(), cooldown=-1), "cooldown (-1)"),
        (lambda: Policy(link(), urgent=1), "urgent (1) more than 1"),
        (lambda: Policy(link(), forced="local"), "forced is 'local', not one of replicated, gather, dispatch"),
        (lambda: Workload(1, 1, 1).parts("local", 1, 2), "mode is 'local'"),
    ],
)
def test_rejected(call, words):
    with pytest.raises(mlxdist.InvalidArgument) as raised:
        call()
    assert words in str(raised.value)
