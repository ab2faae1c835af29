/* The product over all ranks, which MLX's distributed module has no slot for. It has no gradient: the one of
 * MLX's all_sum, the identity, would be wrong for a product. */
#pragma once

#include "primitive.h"

namespace mlxdist {

mlx::core::array all_prod(const mlx::core::array& x, std::shared_ptr<Connection> connection,
                          mlx::core::StreamOrDevice s);

class AllProd : public Primitive {
 public:
  using Primitive::Primitive;

  void eval_cpu(const std::vector<mlx::core::array>& inputs, std::vector<mlx::core::array>& outputs) override;
  std::pair<std::vector<mlx::core::array>, std::vector<int>> vmap(const std::vector<mlx::core::array>& inputs,
                                                                  const std::vector<int>& axes) override;
  const char* name() const override { return "all_reduce (prod)"; }
};

} // namespace mlxdist
