#include "operations.h"

#include <cstring>

namespace mlxdist {

namespace mx = mlx::core;

/* Elsewhere than on the root the result has no elements; as a gradient, it has those of the input, all zero. */
class Gather : public Primitive {
 public:
  Gather(Place place, int root) : Primitive(std::move(place)), root_(root) {}
  const char* name() const override { return "gather"; }

 protected:
  std::shared_ptr<Primitive> copy() override { return new_gather(place(), root_); }
  std::shared_ptr<Primitive> adjoint() override { return new_scatter(place(), root_); }
  mx::Shape result_shape(const mx::Shape& in) const override {
    return is_root() ? times_first(in, connection_->size()) : with_first(in, 0);
  }
  void evaluate(const mx::array& in, mx::array& out) override {
    allocate(out);
    enqueue([in = data_of(in), out = data_of(out), layout = layout_of(in), root = root_,
             zeros = is_root() ? 0 : out.nbytes()](mlxdist_group* group) {
      if (zeros > 0) std::memset(out, 0, zeros);
      return mlxdist_gather(group, in, out, &layout, root, nullptr);
    });
  }

 private:
  bool is_root() const { return connection_->rank() == root_; }

  const int root_;
};

std::shared_ptr<Primitive> new_gather(Place place, int root) {
  return std::make_shared<Gather>(std::move(place), root);
}

mx::array gather(const mx::array& x, SharedConnection connection, int root, mx::StreamOrDevice s, double timeout) {
  if (connection->size() == 1) return x;
  return Primitive::apply(new_gather(place_of(std::move(connection), s, timeout), root), x);
}

}  // namespace mlxdist
