"""Which ranks go on after a loss: random histories of an elastic job, with deaths and messages late, twice and lost."""

import contextlib
import random
from collections import Counter

import pytest

from mlxdist.launch.membership import Membership, NotAMember


class Process:
    """A rank as the launcher sees it: it asks, gets an answer, and its new world forms or fails.

    ``formed``: the epoch whose world it is in. ``epoch``: the last that it has an answer for, None before any.
    """

    def __init__(self, member, epoch, attempt):
        self.member, self.formed, self.epoch, self.attempt = member, epoch, epoch, attempt
        self.alive, self.asks, self.answers = True, False, {}


class Simulation:
    """All messages are in one bag, from which the seed takes the next: any delay, any order, some of them twice."""

    def __init__(self, seed, size, least):
        self.random = random.Random(seed)
        self.membership = Membership(size, least)
        self.processes = [Process(member, 0, 0) for member in range(size)]
        self.all = list(self.processes)
        self.bag = []
        self.deaths = self.random.randint(1, max(1, size - least + 1))  # at most one too many
        self.starts = self.random.choice([0, 0, 1, 2, 4])  # of processes in the place of lost ones
        self.gone = set()
        self.ended = []  # places whose process the launcher has seen ending
        self.decisions = {0: tuple(range(size))}
        self.worlds = {0: tuple(self.processes)}
        self.growing = set()  # epochs whose rank 0 knows that others wait to join

    def run(self):
        for _ in range(10_000):
            if steps := self.possible():
                self.random.choice(steps)()
            elif not self.expel():
                return
        raise AssertionError("it does not end")

    def possible(self):
        """What can happen next."""
        living = [process for process in self.processes if process.alive]
        steps = [self.deliver] * (3 * bool(self.bag))
        if self.deaths and living and (not self.bag or self.random.random() < 0.2):
            steps.append(lambda: self.die(self.random.choice(living)))
        if self.starts and self.ended and self.membership.is_enough:
            steps.append(self.start)
        return steps + [step for process in living for step in self.steps_of(process)]

    def steps_of(self, process):
        if process.asks:  # Ctrl-C, or a connection that is lost
            return [lambda: self.give_up(process)] * (self.random.random() < 0.05)
        if process.epoch is None:
            return [lambda: self.ask(process, "join")]
        world = self.worlds[process.epoch]
        if process is world[0] and process.formed == process.epoch and self.membership.joining:
            self.growing.add(process.epoch)
        steps = []
        gone = (process.epoch, process.epoch in self.growing)  # of a world that grows, all leave together
        if any(not member.alive or (member.epoch or 0, member.asks) > gone for member in world):
            steps += [lambda: self.ask(process, "shrink")] * self.membership.is_enough
        if process.formed != process.epoch:
            steps += [lambda: setattr(process, "formed", process.epoch)] * all(member.alive for member in world)
        elif process.epoch in self.growing:
            steps.append(lambda: self.ask(process, "grow"))
        return steps

    def expel(self):
        """What the launcher does once it has waited for too long. Returns whether there was anything."""
        self.membership.refuse()
        late = list(self.membership.missing)
        assert not any(self.processes[member].alive for member in late), "a living rank has not come"
        for member in late:
            self.membership.end(member)
        self.decide()
        return bool(late)

    def start(self):
        """The launcher starts a process in the place of one that has ended."""
        self.starts -= 1
        member = self.ended.pop(self.random.randrange(len(self.ended)))
        self.processes[member] = Process(member, None, self.processes[member].attempt)
        self.all.append(self.processes[member])

    def die(self, process):
        self.deaths -= 1
        process.alive = False
        self.send("end", process)
        self.send("withdraw", process, process.attempt)

    def ask(self, process, how):
        process.asks = True
        process.attempt += 1
        self.send(how, process, process.epoch, process.attempt)

    def give_up(self, process):
        process.asks = False
        self.send("withdraw", process, process.attempt)

    def send(self, *message):
        self.bag += [message] * (1 + (message[0] not in ("end", "withdraw") and self.random.random() < 0.2))

    def deliver(self):
        kind, process, *rest = self.bag.pop(self.random.randrange(len(self.bag)))
        if process not in self.gone or kind == "answer":  # a host lets nothing of a process through after its end
            getattr(self, f"take_{kind}")(process, *rest)
        self.decide()

    def decide(self):
        if decision := self.membership.decide():
            self.check(decision)
            for number in decision.members:
                self.send("answer", self.processes[number], decision)

    def take_end(self, process):
        self.membership.end(process.member)
        self.ended.append(process.member)
        self.gone.add(process)

    def take_withdraw(self, process, attempt):
        self.membership.withdraw(process.member, attempt)

    def take_shrink(self, process, epoch, attempt, grows=False):
        with contextlib.suppress(NotAMember):
            address = f"{process.member}:{attempt}"
            if decision := self.membership.ask(process.member, epoch, attempt, address, grows):
                self.send("answer", process, decision)

    def take_grow(self, process, epoch, attempt):
        self.take_shrink(process, epoch, attempt, grows=True)

    def take_join(self, process, _, attempt):
        with contextlib.suppress(NotAMember):
            if decision := self.membership.join(process.member, attempt, f"{process.member}:{attempt}"):
                self.send("answer", process, decision)

    def take_answer(self, process, decision):
        if process.alive and process.asks and (process.epoch is None or decision.number == process.epoch + 1):
            process.asks, process.epoch = False, decision.number
            process.answers[decision.number] = decision

    def check(self, decision):
        before = self.decisions[decision.number - 1]
        assert decision.number not in self.decisions, "an epoch is decided once"
        stay = [member for member in before if member in decision.members]
        joined = [member for member in decision.members if self.processes[member].epoch is None]
        assert len(decision.members) == len(set(decision.members)) >= self.membership.least
        assert decision.address.startswith(f"{decision.members[0]}:") and decision.members[0] not in joined
        assert list(decision.members) == [member for member in stay if member not in joined] + sorted(joined)
        self.decisions[decision.number] = decision.members
        self.worlds[decision.number] = tuple(self.processes[member] for member in decision.members)

    def result(self):
        """Checks what holds at the end of every history, and returns how it has ended."""
        for process in self.all:
            for epoch, decision in process.answers.items():
                assert decision.members == self.decisions[epoch], "all have the same answer"
                assert process in self.worlds[epoch], "a member is in its own epoch"
        living = [process for process in self.processes if process.alive]
        if len(self.membership.living) < self.membership.least:
            return "too few"
        world = self.worlds[self.membership.epoch]
        assert set(living) == set(world), "those that live are the last epoch, and no others"
        assert all(process.formed == self.membership.epoch for process in living), "all have come to it"
        if len(world) > min(map(len, self.decisions.values())):
            return "grown"
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
    assert min(ends[end] for end in ("epoch 1", "epoch 2", "epoch 3", "grown", "too few")) > 30, ends


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


def test_processes_join_where_all_ask_to_grow():
    membership = Membership(3, least=1)
    membership.end(0)
    assert membership.join(0, 1, "new") is None and membership.joining == [0]
    with pytest.raises(NotAMember):
        membership.join(1, 1, "")
    membership.ask(1, 0, 1, "one", grows=True)
    membership.ask(2, 0, 1, "two")  # it has not noticed, and shrinks
    assert membership.decide() == (1, (1, 2), "one") and membership.joining == [0]
    for member in (1, 2):
        membership.ask(member, 1, 2, str(member), grows=True)
    decision = membership.decide()
    assert decision == (2, (1, 2, 0), "1") and membership.joining == []
    assert membership.join(0, 2, "again") == decision
    membership.end(0)
    assert membership.join(0, 3, "another") is None
    membership.withdraw(0, 3)
    assert membership.joining == []
