#include "broadcast.h"

#include <cstring>

#include "mlx/allocator.h"

namespace mlxdist {

namespace mx = mlx::core;

using Arrays = std::vector<mx::array>;

/* What broadcast and its adjoint share. Both are linear, and each is the gradient of the other: what leaves the
 * root for all ranks collects their cotangents back at the root. The other ranks' inputs do not count, so their
 * gradient is zero. */
template <class Self, class Adjoint>
class Rooted : public Primitive {
 public:
  Rooted(mx::Stream stream, std::shared_ptr<Connection> connection, int root)
      : Primitive(stream, std::move(connection)), root_(root) {}

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    return {{apply<Self>(inputs[0], connection_, stream(), root_)}, axes};
  }
  Arrays jvp(const Arrays&, const Arrays& tangents, const std::vector<int>&) override {
    return {apply<Self>(tangents[0], connection_, stream(), root_)};
  }
  Arrays vjp(const Arrays&, const Arrays& cotangents, const std::vector<int>&, const Arrays&) override {
    return {apply<Adjoint>(cotangents[0], connection_, stream(), root_)};
  }

 protected:
  const int root_;
};

class SumOnRoot;

class Broadcast : public Rooted<Broadcast, SumOnRoot> {
 public:
  using Rooted::Rooted;
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  const char* name() const override { return "broadcast"; }
};

/* The sum of all ranks' arrays on the root, zeros on the others. */
class SumOnRoot : public Rooted<SumOnRoot, Broadcast> {
 public:
  using Rooted::Rooted;
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  const char* name() const override { return "gradient of broadcast"; }
};

mx::array broadcast(const mx::array& x, std::shared_ptr<Connection> connection, int root, mx::StreamOrDevice s) {
  if (root < 0 || root >= connection->size()) {
    throw Error(MLXDIST_INVALID_ARGUMENT, "broadcast: root is " + std::to_string(root) + ", but the ranks are 0 to " +
                std::to_string(connection->size() - 1));
  }
  if (connection->size() == 1) return x;
  auto stream = communication_stream(*connection, s);
  return apply<Broadcast>(x, std::move(connection), stream, root);
}

void Broadcast::eval_cpu(const Arrays& inputs, Arrays& outputs) {
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

/* One primitive for all ranks, not a sum and then zeros: graphs of the same shape are evaluated in the same
 * order, which all ranks must agree on. */
void SumOnRoot::eval_cpu(const Arrays& inputs, Arrays& outputs) {
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

} // namespace mlxdist
