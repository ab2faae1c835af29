"""Classes without a public constructor: a call says which function makes the object."""

import importlib

import pytest

import mlxdist
from mlxdist import nn
from mlxdist.base.opaque import Opaque, create
from mlxdist.nn import expert_parallel

FACTORIES = {
    mlxdist.Group: "mlxdist.init and Group.split",
    mlxdist.Handle: "operations with async_op=True",
    mlxdist.Mesh: "mlxdist.mesh",
    mlxdist.Registration: "Group.register",
    nn.ExpertParallelSwitchGLU: "ExpertParallelSwitchGLU.from_switch",
    nn.SplitBlock: "SplitBlock.from_layer",
    nn.SplitModel: "SplitModel.from_model",
    nn.Stage: "pipeline_parallel",
    expert_parallel.DispatchHandle: "dispatch",
}


@pytest.mark.parametrize("kind", FACTORIES, ids=lambda kind: kind.__name__)
def test_a_call_of_an_opaque_class_names_its_factory(kind):
    with pytest.raises(TypeError) as caught:
        kind()
    assert str(caught.value) == f"{kind.__name__} has no public constructor: it is made by {FACTORIES[kind]}"


def test_every_public_opaque_class_is_tested():
    packages = map(importlib.import_module, ("mlxdist", "mlxdist.nn", "mlxdist.nn.expert_parallel", "mlxdist.train"))
    public = (getattr(package, name) for package in packages for name in package.__all__)
    assert {kind for kind in public if isinstance(kind, Opaque)} == set(FACTORIES)


class Point(metaclass=Opaque):
    _made_by = "point"

    def __init__(self, x, *, y):
        self.x, self.y = x, y


class Point3(Point):
    pass


@pytest.mark.parametrize("kind", [Point, Point3])
def test_create_calls_the_constructor(kind):
    made = create(kind, 1, y=2)
    assert type(made) is kind and (made.x, made.y) == (1, 2)


def test_a_subclass_is_opaque():
    with pytest.raises(TypeError, match="^Point3 has no public constructor: it is made by point$"):
        Point3(1, y=2)
