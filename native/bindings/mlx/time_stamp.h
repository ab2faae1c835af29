/* When arrays were computed: an array like any other, so that nothing waits to learn it. */
#pragma once

#include <vector>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlxdist {

/* Nanoseconds of a monotonic clock, int64 of shape (), when all `inputs` are computed and the CPU stream has come to
 * it. */
mlx::core::array time_stamp(std::vector<mlx::core::array> inputs, mlx::core::StreamOrDevice s);

}  // namespace mlxdist
