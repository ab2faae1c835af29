"""Which ranks go on after a loss: random histories of an elastic job, with deaths and messages late, twice and lost."""

import random
from collections import Counter

import pytest

from mlxdist.launch.membership import Membership, NotAMember


class Process:
    """A rank as the launcher sees it: it asks, gets an answer, and its new world forms or fails.

    ``formed``: the epoch whose world it is in. ``epoch``: the last that it has an answer for.
    """

    def __init__(self, member):
        self.member, self.formed, self.epoch, self.alive, self.asks = member, 0, 0, True, False
        self.attempt, self.answers = 0, {}


class Simulation:
    """All messages are in one bag, from which the seed takes the next: any delay, any order, some of them twice."""

    def __init__(self, seed, size, least):
        self.random = random.Random(seed)
        self.membership = Membership(size, least)
        self.processes = [Process(member) for member in range(size)]
        self.bag = []
        self.deaths = self.random.randint(1, max(1, size - least + 1))  # at most one too many
        self.decisions = {0: tuple(range(size))}

    def run(self):
        for _ in range(10_000):
            steps = self.possible()
            if not steps:
                return
            self.random.choice(steps)()
        raise AssertionError("it does not end")

    def possible(self):
        """What can happen next. Without a step the history is over."""
        living = [process for process in self.processes if process.alive]
        steps = [self.deliver] * (3 * bool(self.bag))
        if self.deaths and living and (not self.bag or self.random.random() < 0.2):
            steps.append(lambda: self.die(self.random.choice(living)))
        for process in living:
            broken = any(not self.processes[member].alive for member in self.decisions[process.epoch])
            if broken and not process.asks and self.membership.is_enough:
                steps.append(lambda process=process: self.ask(process))
            if process.asks and self.random.random() < 0.05:  # Ctrl-C, or a connection that is lost
                steps.append(lambda process=process: self.give_up(process))
            if process.formed < process.epoch and not broken:
                steps.append(lambda process=process: setattr(process, "formed", process.epoch))
        return steps

    def die(self, process):
        self.deaths -= 1
        process.alive = False
        self.send("end", process.member)

    def ask(self, process):
        process.asks = True
        process.attempt += 1
        self.send("ask", process.member, process.epoch, process.attempt)

    def give_up(self, process):
        process.asks = False
        self.send("withdraw", process.member, process.attempt)

    def send(self, *message):
        self.bag += [message] * (1 + (message[0] in ("ask", "answer") and self.random.random() < 0.2))

    def deliver(self):
        kind, member, *rest = self.bag.pop(self.random.randrange(len(self.bag)))
        getattr(self, f"take_{kind}")(member, *rest)
        if decision := self.membership.decide():
            self.check(decision)
            for number in decision.members:
                self.send("answer", number, decision)

    def take_end(self, member):
        self.membership.end(member)

    def take_withdraw(self, member, attempt):
        self.membership.withdraw(member, attempt)

    def take_ask(self, member, epoch, attempt):
        try:
            decision = self.membership.ask(member, epoch, attempt, f"{member}:{attempt}")
        except NotAMember:
            return
        if decision is not None:
            self.send("answer", member, decision)

    def take_answer(self, member, decision):
        process = self.processes[member]
        if process.alive and process.asks and decision.epoch == process.epoch + 1:
            process.asks, process.epoch = False, decision.epoch
            process.answers[decision.epoch] = decision

    def check(self, decision):
        before = self.decisions[decision.epoch - 1]
        assert decision.epoch not in self.decisions, "an epoch is decided once"
        assert list(decision.members) == [member for member in before if member in decision.members]
        assert len(decision.members) >= self.membership.least
        assert decision.address.startswith(f"{decision.members[0]}:")
        self.decisions[decision.epoch] = decision.members

    def result(self):
        """Checks what holds at the end of every history, and returns how it has ended."""
        for process in self.processes:
            for epoch, decision in process.answers.items():
                assert decision.members == self.decisions[epoch], "all have the same answer"
                assert process.member in decision.members, "a member is in its own epoch"
        living = [process for process in self.processes if process.alive]
        if len(living) < self.membership.least:
            return "too few"
        last = self.decisions[self.membership.epoch]
        assert [process.member for process in living] == list(last), "those that live are the last epoch, and no others"
        assert all(process.formed == self.membership.epoch for process in living), "all have come to it"
        return f"epoch {min(self.membership.epoch, 3)}"


def histories(seeds):
    ends = Counter()
    for seed in seeds:
        size = 1 + seed % 8
        simulation = Simulation(seed, size, 1 + seed // 8 % ((size + 1) // 2))
        try:
            simulation.run()
            ends[simulation.result()] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    return ends


def test_random_histories():
    ends = histories(range(3_000))
    assert min(ends[f"epoch {epoch}"] for epoch in (1, 2, 3)) > 50 < ends["too few"], ends


@pytest.mark.long
def test_a_hundred_thousand_random_histories():
    histories(range(3_000, 103_000))


def test_all_that_live_have_to_ask():
    membership = Membership(4, least=2)
    membership.end(2)
    assert membership.ask(0, 0, 1, "zero") is None and membership.decide() is None
    assert membership.missing == [1, 3]
    membership.ask(3, 0, 1, "three")
    membership.end(1)
    decision = membership.decide()
    assert decision == (1, (0, 3), "zero") and membership.missing == [] == membership.waiting
    assert membership.ask(3, 0, 1, "three") == decision  # it has not got the answer
    for member, epoch in [(2, 0), (1, 1), (0, 2), (7, 0)]:
        with pytest.raises(NotAMember):
            membership.ask(member, epoch, 2, "")
    membership.ask(0, 1, 2, "zero")
    membership.end(3)
    assert not membership.is_enough and membership.decide() is None


def test_a_question_can_be_taken_back():
    """What is late does not take the place of a newer question, nor take that back."""
    membership = Membership(2, least=1)
    membership.ask(1, 0, 1, "one")
    membership.withdraw(1, 1)
    membership.ask(1, 0, 1, "one")
    membership.ask(0, 0, 1, "zero")
    assert membership.decide() is None and membership.missing == [1]
    membership.ask(0, 0, 3, "third")
    membership.ask(0, 0, 2, "second")
    membership.withdraw(0, 2)
    membership.ask(1, 0, 2, "two")
    assert membership.decide() == (1, (0, 1), "third")
