/* What our own operations on mx.array share: one array in, one of the same shape and dtype out, on a CPU stream. */
#pragma once

#include <vector>

#include "connection.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace mlxdist {

class Primitive : public mlx::core::Primitive {
 public:
  Primitive(mlx::core::Stream stream, std::shared_ptr<Connection> connection)
      : mlx::core::Primitive(stream), connection_(std::move(connection)) {}

  void eval_gpu(const std::vector<mlx::core::array>& inputs, std::vector<mlx::core::array>& outputs) override;
  std::vector<mlx::core::Shape> output_shapes(const std::vector<mlx::core::array>& inputs) override {
    return {inputs[0].shape()};
  }

 protected:
  const std::shared_ptr<Connection> connection_;
};

/* The CPU stream that a communication runs on, chosen as MLX chooses it for its own. MLX and our operations ask for
 * it when a graph is built, so what check() finds is known before anything is evaluated. */
mlx::core::Stream communication_stream(Connection& connection, mlx::core::StreamOrDevice s);

/* out[i] = op over all ranks of in[i], for MLX's operations and ours. `in` is row-contiguous and may be `out`. */
void enqueue_all_reduce(std::shared_ptr<Connection> connection, const mlx::core::array& in, mlx::core::array& out,
                        mlxdist_op op, mlx::core::Stream stream);

/* Gives `out` memory: that of `in` if nobody else reads it. */
void allocate_like(const mlx::core::array& in, mlx::core::array& out);

/* The lazy result of primitive P on `x`, which is made row-contiguous first as the engine needs it. */
template <class P, class... Arguments>
mlx::core::array apply(const mlx::core::array& x, std::shared_ptr<Connection> connection, mlx::core::Stream stream,
                       Arguments... arguments) {
  return mlx::core::array(x.shape(), x.dtype(), std::make_shared<P>(stream, std::move(connection), arguments...),
                          {mlx::core::contiguous(x, false, stream)});
}

} // namespace mlxdist
