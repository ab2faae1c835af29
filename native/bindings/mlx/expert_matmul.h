/* Matrix products with the experts of this rank, on the CPU, where the pairs of other ranks' experts cost nothing.
 *
 * MLX's gather_mm multiplies every row by some matrix. Without knowing the routing a rank would compute as much as one
 * process does, and of few tokens that takes longer than all else. */
#pragma once

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mlxdist {

/* out[t, j] = weights[experts[t, j]] rows[t, j], and zeros where experts[t, j] is none of the weights'.
 *
 * rows (tokens, k or 1, in), weights (experts, out, in), both float32; experts (tokens, k) uint32; no gradient. */
mlx::core::array expert_matmul(const mlx::core::array& rows, const mlx::core::array& weights,
                               const mlx::core::array& experts);

}  // namespace mlxdist
