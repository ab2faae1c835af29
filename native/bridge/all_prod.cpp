#include "all_prod.h"

namespace mlxdist {

namespace mx = mlx::core;

mx::array all_prod(const mx::array& x, std::shared_ptr<Connection> connection, mx::StreamOrDevice s) {
  if (connection->size() == 1) return x;
  auto stream = communication_stream(*connection, s);
  return apply<AllProd>(x, std::move(connection), stream);
}

void AllProd::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  allocate_like(inputs[0], outputs[0]);
  enqueue_all_reduce(connection_, inputs[0], outputs[0], MLXDIST_PROD, stream());
}

std::pair<std::vector<mx::array>, std::vector<int>> AllProd::vmap(const std::vector<mx::array>& inputs,
                                                                  const std::vector<int>& axes) {
  return {{apply<AllProd>(inputs[0], connection_, stream())}, axes};
}

} // namespace mlxdist
