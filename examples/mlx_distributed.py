"""A program that knows nothing of mlxdist: MLX's own distributed API, of which `mlxdist launch` makes use of mlxdist.

    mlxdist launch -n 2 -- python examples/mlx_distributed.py
    mlxdist launch --hostfile rmlx-hosts.json -- python examples/mlx_distributed.py --steps 200

It has the shapes that MLX's documentation and examples teach: sums over all ranks, messages between neighbours,
training with averaged gradients, here of a small network that learns which of two interleaved spirals a point belongs
to, and the same network again with its hidden features split over the ranks. Every rank trains on its own part of each
batch; the loss is the same on any number of ranks that divides the batch.
"""

import argparse
import math

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

BATCH = 256


def sums(world: mx.distributed.Group) -> None:
    ones = mx.distributed.all_sum(mx.ones(4))  # group=None is that of all ranks
    ranks = mx.distributed.all_gather(mx.array([world.rank()]))
    mx.eval(ones, ranks)  # on every rank, or the others wait
    if world.rank() == 0:
        print(f"{world.size()} ranks: sum {ones.tolist()}, gathered {ranks.tolist()}")


def around(world: mx.distributed.Group) -> None:
    """A number visits every rank, which adds its own, and comes back to rank 0."""
    if world.size() == 1:
        return
    before, after = (world.rank() - 1) % world.size(), (world.rank() + 1) % world.size()
    if world.rank() == 0:
        mx.eval(mx.distributed.send(mx.array([0]), after))
        print(f"around the ring: {mx.distributed.recv((1,), mx.int32, before).item()}")
    else:
        number = mx.distributed.recv((1,), mx.int32, before)
        mx.eval(mx.distributed.send(number + world.rank(), after))


def spirals(points: int) -> tuple[mx.array, mx.array]:
    which = mx.arange(points) % 2
    turn = mx.random.uniform(shape=(points,)) * 3 * math.pi
    angle = turn + which * math.pi
    place = mx.stack([turn * mx.cos(angle), turn * mx.sin(angle)], axis=1) / (3 * math.pi)
    return place, which


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [2, 64, 64, 2]
        self.layers = [nn.Linear(inputs, outputs) for inputs, outputs in zip(sizes, sizes[1:])]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers[:-1]:
            x = mx.tanh(layer(x))
        return self.layers[-1](x)


def train(world: mx.distributed.Group, steps: int) -> Network:
    mx.random.seed(0)  # the same weights and batches everywhere
    network, optimizer = Network(), optim.Adam(1e-2)
    mx.eval(network.parameters())

    def loss_of(points: mx.array, labels: mx.array) -> mx.array:
        return nn.losses.cross_entropy(network(points), labels, reduction="mean")

    loss_and_gradients = nn.value_and_grad(network, loss_of)
    for step in range(steps):
        points, labels = spirals(BATCH)
        mine = slice(world.rank(), None, world.size())
        loss, gradients = loss_and_gradients(points[mine], labels[mine])
        optimizer.update(network, nn.average_gradients(gradients))
        loss = mx.distributed.all_sum(loss) / world.size()
        mx.eval(network.parameters(), optimizer.state, loss)
        if world.rank() == 0 and (step % 50 == 0 or step == steps - 1):
            print(f"step {step:3} loss {loss.item():.4f}")
    return network


def split(network: Network) -> None:
    """Every rank keeps its part of the first two layers; a sum after the second makes the whole of them again."""
    points, _ = spirals(BATCH)
    whole = network(points)
    mx.eval(whole)
    first, second, last = network.layers
    network.layers = [nn.AllToShardedLinear.from_linear(first), nn.ShardedToAllLinear.from_linear(second), last]
    difference = mx.abs(network(points) - whole).max()
    mx.eval(difference)
    if mx.distributed.init().rank() == 0:
        print(f"split over the ranks: largest difference {difference.item():.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="of the training")
    arguments = parser.parse_args()
    world = mx.distributed.init()
    if BATCH % world.size():
        parser.error(f"a batch of {BATCH} cannot be divided among {world.size()} ranks")
    sums(world)
    around(world)
    split(train(world, arguments.steps))


if __name__ == "__main__":
    main()
