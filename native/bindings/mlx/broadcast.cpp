#include "operations.h"

namespace mlxdist {

namespace mx = mlx::core;

/* What leaves the root for all ranks collects their cotangents back at the root. The other ranks' inputs do not
 * count, so their gradient is zero. */
class Broadcast : public Primitive {
 public:
  Broadcast(Place place, int root) : Primitive(std::move(place)), root_(root) {}
  const char* name() const override { return "broadcast"; }

 protected:
  std::shared_ptr<Primitive> copy() override { return new_broadcast(place(), root_); }
  std::shared_ptr<Primitive> adjoint() override { return new_reduce(place(), MLXDIST_SUM, root_); }
  void evaluate(const mx::array& in, mx::array& out) override {
    if (connection_->rank() == root_) {
      out.copy_shared_buffer(in); /* the root's data is only read */
    } else {
      allocate_like(in, out);
    }
    enqueue([data = data_of(out), layout = layout_of(out), root = root_](mlxdist_group* group) {
      return mlxdist_broadcast(group, data, &layout, root, nullptr);
    });
  }

 private:
  const int root_;
};

std::shared_ptr<Primitive> new_broadcast(Place place, int root) {
  return std::make_shared<Broadcast>(std::move(place), root);
}

mx::array broadcast(const mx::array& x, SharedConnection connection, int root, mx::StreamOrDevice s, double timeout) {
  if (connection->size() == 1) return x;
  return Primitive::apply(new_broadcast(place_of(std::move(connection), s, timeout), root), x);
}

}  // namespace mlxdist
