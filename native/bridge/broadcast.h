/* broadcast, which MLX's distributed module has no slot for. */
#pragma once

#include "primitive.h"

namespace mlxdist {

/* The root's array on every rank. */
mlx::core::array broadcast(const mlx::core::array& x, std::shared_ptr<Connection> connection, int root,
                           mlx::core::StreamOrDevice s);

} // namespace mlxdist
