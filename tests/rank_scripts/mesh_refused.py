"""One rank of test_mesh.py. Arguments: sizes of axes that do not fit, dp=2 tp=3. Prints why."""

import sys

import mlxdist

sizes = {name: int(size) for name, size in (word.split("=") for word in sys.argv[1:])}
try:
    mlxdist.mesh(**sizes)
except mlxdist.InvalidArgument as error:
    print(error)
else:
    sys.exit(f"{sizes} are accepted")
