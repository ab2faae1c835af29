"""RDMA devices: which there are, what is wrong with them, and which of them joins two ranks.

    device.py       devices and their addresses, as the engine's verbs table lists them
    listing.py      the same in a process of its own, which a driver may hang or crash
    with_pyverbs.py the same by rdma-core's Python bindings
    links.py        which device and address serve which rank
    device_map.py   the matrix by which users say it themselves
    facts.py        what this machine says about itself; diagnosis.py what is wrong with it, and what to do
    command.py      `mlxdist devices`

It runs without MLX: of the compiled half it loads the engine alone.
"""

__all__: list[str] = []
