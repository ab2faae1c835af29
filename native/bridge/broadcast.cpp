#include "broadcast.h"

#include <cstring>

#include "mlx/allocator.h"

namespace mlxdist {

namespace mx = mlx::core;

mx::array broadcast(const mx::array& x, std::shared_ptr<Connection> connection, int root, mx::StreamOrDevice s) {
  if (root < 0 || root >= connection->size()) {
    throw Error(MLXDIST_INVALID_ARGUMENT, "broadcast: root is " + std::to_string(root) + ", but the ranks are 0 to " +
                std::to_string(connection->size() - 1));
  }
  if (connection->size() == 1) return x;
  auto stream = communication_stream(*connection, s);
  return apply<Broadcast>(x, std::move(connection), stream, root);
}

void Broadcast::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& out = outputs[0];
  if (connection_->rank() == root_) {
    out.copy_shared_buffer(inputs[0]); /* the root's data is only read */
  } else {
    allocate_like(inputs[0], out);
  }
  Connection::enqueue(connection_, stream(),
                      [data = data_of(out), layout = layout_of(out), root = root_](mlxdist_group* group) {
                        return mlxdist_broadcast(group, data, &layout, root);
                      });
}

std::pair<std::vector<mx::array>, std::vector<int>> Broadcast::vmap(const std::vector<mx::array>& inputs,
                                                                    const std::vector<int>& axes) {
  return {{apply<Broadcast>(inputs[0], connection_, stream(), root_)}, axes};
}

std::vector<mx::array> Broadcast::jvp(const std::vector<mx::array>&, const std::vector<mx::array>& tangents,
                                      const std::vector<int>&) {
  return {apply<Broadcast>(tangents[0], connection_, stream(), root_)};
}

std::vector<mx::array> Broadcast::vjp(const std::vector<mx::array>&, const std::vector<mx::array>& cotangents,
                                      const std::vector<int>&, const std::vector<mx::array>&) {
  return {apply<SumOnRoot>(cotangents[0], connection_, stream(), root_)};
}

/* One primitive for all ranks, not a sum and then zeros: graphs of the same shape are evaluated in the same
 * order, which all ranks must agree on. */
void SumOnRoot::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& out = outputs[0];
  allocate_like(inputs[0], out);
  Connection::enqueue(connection_, stream(),
                      [in = data_of(inputs[0]), out = data_of(out), bytes = out.nbytes(),
                       layout = layout_of(out), keep = connection_->rank() == root_](mlxdist_group* group) {
                        int status = mlxdist_all_reduce(group, in, out, &layout, MLXDIST_SUM);
                        if (!keep && bytes > 0) std::memset(out, 0, bytes);
                        return status;
                      });
}

std::pair<std::vector<mx::array>, std::vector<int>> SumOnRoot::vmap(const std::vector<mx::array>& inputs,
                                                                    const std::vector<int>& axes) {
  return {{apply<SumOnRoot>(inputs[0], connection_, stream(), root_)}, axes};
}

std::vector<mx::array> SumOnRoot::jvp(const std::vector<mx::array>&, const std::vector<mx::array>& tangents,
                                      const std::vector<int>&) {
  return {apply<SumOnRoot>(tangents[0], connection_, stream(), root_)};
}

std::vector<mx::array> SumOnRoot::vjp(const std::vector<mx::array>&, const std::vector<mx::array>& cotangents,
                                      const std::vector<int>&, const std::vector<mx::array>&) {
  return {apply<Broadcast>(cotangents[0], connection_, stream(), root_)};
}

} // namespace mlxdist
