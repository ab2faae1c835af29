/*
 * The operations that MLX's distributed module has no slot for, and those whose gradient is another one here.
 *
 * mlxdist/runtime/ops.py checks the arguments and says what the operations do. In a group of one the result is the
 * input. `timeout` is the deadline in seconds, negative for the group's; gradients have it too.
 */
#pragma once

#include <vector>

#include "primitive.h"

namespace mlxdist {

using SharedConnection = std::shared_ptr<Connection>;
using Counts = std::vector<uint64_t>;

/* For all but the sum: MLX has no product, and gives maximum and minimum the gradient of the sum. */
mlx::core::array all_reduce(const mlx::core::array& x, SharedConnection connection, int op, mlx::core::StreamOrDevice s,
                            double timeout);
mlx::core::array all_gather(const mlx::core::array& x, SharedConnection connection, mlx::core::StreamOrDevice s,
                            double timeout);
mlx::core::array all_gather_as_in_mlx(const mlx::core::array& x, SharedConnection connection,
                                      mlx::core::StreamOrDevice s, double timeout);
mlx::core::array reduce_scatter(const mlx::core::array& x, SharedConnection connection, int op,
                                mlx::core::StreamOrDevice s, double timeout);
mlx::core::array broadcast(const mlx::core::array& x, SharedConnection connection, int root,
                           mlx::core::StreamOrDevice s, double timeout);
mlx::core::array reduce(const mlx::core::array& x, SharedConnection connection, int op, int root,
                        mlx::core::StreamOrDevice s, double timeout);
mlx::core::array gather(const mlx::core::array& x, SharedConnection connection, int root, mlx::core::StreamOrDevice s,
                        double timeout);
mlx::core::array scatter(const mlx::core::array& x, SharedConnection connection, int root, mlx::core::StreamOrDevice s,
                         double timeout);
mlx::core::array all_to_all(const mlx::core::array& x, SharedConnection connection, mlx::core::StreamOrDevice s,
                            double timeout);
mlx::core::array all_to_all_v(const mlx::core::array& x, SharedConnection connection, Counts send_counts,
                              Counts receive_counts, mlx::core::StreamOrDevice s, double timeout);
mlx::core::array sendrecv(const mlx::core::array& x, SharedConnection connection, int to, int from,
                          const std::vector<int>& shape, mlx::core::Dtype dtype, mlx::core::StreamOrDevice s,
                          double timeout);

/* For those that are adjoint to each other. */
std::shared_ptr<Primitive> new_all_gather(Place place);
std::shared_ptr<Primitive> new_reduce_scatter(Place place, mlxdist_op op);
std::shared_ptr<Primitive> new_broadcast(Place place, int root);
std::shared_ptr<Primitive> new_reduce(Place place, mlxdist_op op, int root);
std::shared_ptr<Primitive> new_gather(Place place, int root);
std::shared_ptr<Primitive> new_scatter(Place place, int root);

}  // namespace mlxdist
