"""One rank of test_ordering.py. Prints "ordered" at the end."""

import gc
from collections.abc import Callable

import mlx.core as mx

import mlxdist
from mlxdist.runtime.operations.ordering import Order

group = mlxdist.init()
rank, size = group.rank(), group.size()
STREAM = mx.new_stream(mx.cpu)
TOTAL = sum(range(1, size + 1))


def add_up(x: mx.array) -> mx.array:
    return mlxdist.all_sum(x, stream=STREAM)


def sums(arrays: list[mx.array]) -> list[mx.array]:
    return [mlxdist.all_sum(array) for array in arrays]


def evaluated_in_another_order_on_each_rank(order: Order) -> None:
    """Also behind an array without elements, and where the graphs of ranks differ."""
    results = []
    for length in (3, 0, 5, 4):
        x = mx.full((length,), rank + 1.0)
        for _ in range(rank * length):
            x = x + 0.0
        results.append(order.carry_out(add_up, x))
    mx.eval(*(results[(rank + place) % len(results)] for place in (3, 2, 1, 0)))
    assert [result.tolist() for result in results] == [[TOTAL] * length for length in (3, 0, 5, 4)]


def after_what_is_given() -> None:
    """An operation waits for arrays that it does not take."""
    first, second = Order(STREAM), Order(STREAM)
    x = first.carry_out(add_up, mx.ones((2,)))
    y = second.carry_out(add_up, mx.ones((3,)), *first._before)
    mx.eval(*((x, y) if rank % 2 else (y, x)))
    assert (x.tolist(), y.tolist()) == ([size] * 2, [size] * 3)


def gradients_of_one_rank_depend_on_nothing() -> None:
    """The cotangent of the token reaches each run, also where the loss of a rank does not use what the first returns,
    and whichever gradient a rank evaluates first."""

    def loss(a: mx.array, b: mx.array) -> mx.array:
        order = Order()
        (first,) = order.run(sums, sums, [a])
        (second,) = order.run(sums, sums, [b * (rank + 1)])
        return second.sum() + (first.sum() if rank else 0.0)

    for transformed in (loss, mx.checkpoint(loss), mx.compile(loss)):
        for _ in range(2):  # nothing of one trace comes into the next
            found = mx.grad(transformed, argnums=(0, 1))(mx.ones((3,)), mx.ones((2,)))
            mx.eval(found[rank % 2])
            assert found[0].tolist() == [size - 1] * 3, found
            assert found[1].tolist() == [size * (rank + 1)] * 2, found


def results_are_freed() -> None:
    order = Order(STREAM)
    x = order.carry_out(add_up, mx.ones((2**20,)))
    mx.eval(x)
    before = mx.get_active_memory()
    del x
    gc.collect()
    assert before - mx.get_active_memory() >= 4 * 2**20
    assert order.carry_out(add_up, mx.ones(())).item() == size


def traced(function: Callable[[mx.array], mx.array]) -> None:
    """One order of each call: it can be compiled and differentiated any number of times."""
    for _ in range(2):
        assert function(mx.ones((2,))).tolist() == [size * 2] * 2


def in_turn(x: mx.array) -> mx.array:
    order = Order(STREAM)
    return order.carry_out(add_up, x) + order.carry_out(add_up, x + 0.0)


if __name__ == "__main__":
    evaluated_in_another_order_on_each_rank(Order(STREAM))
    evaluated_in_another_order_on_each_rank(Order())
    after_what_is_given()
    gradients_of_one_rank_depend_on_nothing()
    results_are_freed()
    traced(in_turn)
    traced(mx.compile(in_turn))
    traced(mx.grad(lambda x: in_turn(x).sum() * size))
    print("ordered")
