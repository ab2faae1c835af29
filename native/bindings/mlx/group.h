/* mlxdist's group as MLX's own distributed operations see it. */
#pragma once

#include "connection.h"
#include "mlx/distributed/distributed_impl.h"

namespace mlxdist {

class Group : public mlx::core::distributed::detail::GroupImpl {
 public:
  /* `timeout`: the deadline of the operations in seconds, negative for the group's. The others: see Call. */
  explicit Group(std::shared_ptr<Connection> connection, double timeout, int64_t structure = 0, uint64_t label = 0)
      : connection_(std::move(connection)), timeout_(timeout), structure_(structure), label_(label) {}

  mlx::core::Stream communication_stream(mlx::core::StreamOrDevice s) override;
  int rank() override { return connection_->rank(); }
  int size() override { return connection_->size(); }
  std::shared_ptr<GroupImpl> split(int color, int key) override;

  void all_sum(const mlx::core::array& in, mlx::core::array& out, mlx::core::Stream stream) override;
  void all_max(const mlx::core::array& in, mlx::core::array& out, mlx::core::Stream stream) override;
  void all_min(const mlx::core::array& in, mlx::core::array& out, mlx::core::Stream stream) override;
  void all_gather(const mlx::core::array& in, mlx::core::array& out, mlx::core::Stream stream) override;
  void sum_scatter(const mlx::core::array& in, mlx::core::array& out, mlx::core::Stream stream) override;
  void send(const mlx::core::array& in, int dst, mlx::core::Stream stream) override;
  void recv(mlx::core::array& out, int src, mlx::core::Stream stream) override;

 private:
  Call call() const; /* of MLX's own operations */

  const std::shared_ptr<Connection> connection_;
  const double timeout_;
  const int64_t structure_;
  const uint64_t label_;
};

}  // namespace mlxdist
