/* broadcast, and its adjoint: operations that MLX's distributed module has no slot for. */
#pragma once

#include "primitive.h"

namespace mlxdist {

/* The root's array on every rank. */
mlx::core::array broadcast(const mlx::core::array& x, std::shared_ptr<Connection> connection, int root,
                           mlx::core::StreamOrDevice s);

/* Both are linear, and each is the gradient of the other: what leaves the root for all ranks collects their
 * cotangents back at the root. The other ranks' inputs do not count, so their gradient is zero. */
class Broadcast : public Primitive {
 public:
  Broadcast(mlx::core::Stream stream, std::shared_ptr<Connection> connection, int root)
      : Primitive(stream, std::move(connection)), root_(root) {}

  void eval_cpu(const std::vector<mlx::core::array>& inputs, std::vector<mlx::core::array>& outputs) override;
  const char* name() const override { return "broadcast"; }
  std::pair<std::vector<mlx::core::array>, std::vector<int>> vmap(const std::vector<mlx::core::array>& inputs,
                                                                  const std::vector<int>& axes) override;
  std::vector<mlx::core::array> jvp(const std::vector<mlx::core::array>& primals,
                                    const std::vector<mlx::core::array>& tangents,
                                    const std::vector<int>& argnums) override;
  std::vector<mlx::core::array> vjp(const std::vector<mlx::core::array>& primals,
                                    const std::vector<mlx::core::array>& cotangents, const std::vector<int>& argnums,
                                    const std::vector<mlx::core::array>& outputs) override;

 private:
  const int root_;
};

/* The sum of all ranks' arrays on the root, zeros on the others. */
class SumOnRoot : public Primitive {
 public:
  SumOnRoot(mlx::core::Stream stream, std::shared_ptr<Connection> connection, int root)
      : Primitive(stream, std::move(connection)), root_(root) {}

  void eval_cpu(const std::vector<mlx::core::array>& inputs, std::vector<mlx::core::array>& outputs) override;
  const char* name() const override { return "gradient of broadcast"; }
  std::pair<std::vector<mlx::core::array>, std::vector<int>> vmap(const std::vector<mlx::core::array>& inputs,
                                                                  const std::vector<int>& axes) override;
  std::vector<mlx::core::array> jvp(const std::vector<mlx::core::array>& primals,
                                    const std::vector<mlx::core::array>& tangents,
                                    const std::vector<int>& argnums) override;
  std::vector<mlx::core::array> vjp(const std::vector<mlx::core::array>& primals,
                                    const std::vector<mlx::core::array>& cotangents, const std::vector<int>& argnums,
                                    const std::vector<mlx::core::array>& outputs) override;

 private:
  const int root_;
};

} // namespace mlxdist
