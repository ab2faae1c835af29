#include "operations.h"

namespace mlxdist {

namespace mx = mlx::core;

class Scatter : public Primitive {
 public:
  Scatter(Place place, int root) : Primitive(std::move(place)), root_(root) {}
  const char* name() const override { return "scatter"; }

 protected:
  std::shared_ptr<Primitive> copy() override { return new_scatter(place(), root_); }
  std::shared_ptr<Primitive> adjoint() override { return new_gather(place(), root_); }
  mx::Shape result_shape(const mx::Shape& in) const override {
    return with_first(in, in.empty() ? 1 : in[0] / connection_->size());
  }
  void evaluate(const mx::array& in, mx::array& out) override {
    allocate(out);
    enqueue([in = data_of(in), out = data_of(out), layout = layout_of(out), root = root_](mlxdist_group* group) {
      return mlxdist_scatter(group, in, out, &layout, root, nullptr);
    });
  }

 private:
  const int root_;
};

std::shared_ptr<Primitive> new_scatter(Place place, int root) {
  return std::make_shared<Scatter>(std::move(place), root);
}

mx::array scatter(const mx::array& x, SharedConnection connection, int root, mx::StreamOrDevice s, double timeout) {
  if (connection->size() == 1) return x;
  return Primitive::apply(new_scatter(place_of(std::move(connection), s, timeout), root), x);
}

}  // namespace mlxdist
