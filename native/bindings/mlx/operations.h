/*
 * The operations that MLX's distributed module has no slot for, and those whose gradient is another one here.
 *
 * mlxdist/runtime/operations/collectives.py checks the arguments and says what the operations do. `timeout` is the
 * deadline in seconds, negative for the group's; gradients have it too.
 */
#pragma once

#include <nanobind/nanobind.h>

#include "primitive.h"

namespace mlxdist {

/* A function of the module for each. */
void define_operations(nanobind::module_& m);

}  // namespace mlxdist
