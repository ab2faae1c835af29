"""Drafts are off while they do not pay, by a clock that the test has."""

from hypothesis import given
from hypothesis import strategies as st

from mlxdist.serve.draft_policy import DraftPolicy


class Server:
    """Steps of a server. ``seconds``: of a step without drafts and with; ``tokens``: of a request with drafts."""

    def __init__(self, seconds, tokens, most=3):
        self.now = 0.0
        self.seconds, self.tokens = seconds, tokens
        self.policy = DraftPolicy(most, clock=lambda: self.now)

    def steps(self, number, requests=1, only_decodes=True):
        """The drafts of each step."""
        found = []
        for _ in range(number):
            found.append(self.policy.begin(requests))
            has_drafts = found[-1] > 0
            self.now += self.seconds[has_drafts]
            self.policy.end(round(requests * (self.tokens if has_drafts else 1)), only_decodes)
            self.now += 1.0  # between steps, which does not count
        return found


def test_they_stay_where_they_pay_and_are_tried_again_where_they_do_not():
    assert Server((1.0, 1.5), 2).steps(480).count(0) == 24  # one window without them
    never = Server((1.0, 1.5), 1).steps(960)
    assert never.count(3) == 24 + 24 and never[:24] == [3] * 24 and never[24:480].count(3) == 0


def test_what_is_in_use_stays_within_the_noise():
    server = Server((1.0, 2.08), 2)  # 4 % slower
    server.steps(48)
    assert server.steps(100) == [3] * 100


def test_batches_of_other_sizes_are_measured_by_themselves():
    server = Server((1.0, 1.2), 2)
    server.steps(100, requests=1)
    server.seconds = (1.0, 4.0)
    assert 0 not in server.steps(24, requests=8)
    assert server.steps(100, requests=9) == [0] * 100
    server.seconds = (1.0, 1.2)
    assert server.steps(50, requests=1) == [3] * 50


def test_a_text_that_changes_is_found():
    server = Server((1.0, 1.5), 1)
    server.steps(100)
    server.tokens = 3
    assert server.steps(1000)[-100:].count(3) >= 100 - 24  # but for a window without them


def test_steps_with_prompts_do_not_count():
    server = Server((1.0, 9.0), 1)
    assert server.steps(100, only_decodes=False) == [3] * 100


def test_a_server_without_drafts():
    assert Server((1.0, 1.0), 1, most=0).steps(100) == [0] * 100


@given(
    st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=30),
)
def test_the_faster_way_has_nearly_all_steps(seconds, tokens, before):
    """Whatever has happened before, of any number of requests."""
    server = Server(seconds, tokens)
    for requests, only_decodes in before:
        server.steps(5, requests, only_decodes)
    found = server.steps(2000, requests=2)
    without, having = seconds[0], seconds[1] / tokens
    if having * 1.06 < without or without * 1.06 < having:
        faster = 3 if having < without else 0
        assert found[500:].count(faster) >= 1500 * 0.93
