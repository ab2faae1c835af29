#include "operations.h"

namespace mlxdist {

namespace mx = mlx::core;

/* MLX's all_gather with another gradient: that of all ranks' results, where MLX takes this rank's own alone. */
class AllGather : public Primitive {
 public:
  using Primitive::Primitive;
  const char* name() const override { return "all_gather"; }

 protected:
  std::shared_ptr<Primitive> copy() override { return new_all_gather(place()); }
  std::shared_ptr<Primitive> adjoint() override { return new_reduce_scatter(place(), MLXDIST_SUM); }
  mx::Shape result_shape(const mx::Shape& in) const override { return times_first(in, connection_->size()); }
  void evaluate(const mx::array& in, mx::array& out) override {
    allocate(out);
    enqueue([in = data_of(in), out = data_of(out), layout = layout_of(in)](mlxdist_group* group) {
      return mlxdist_all_gather(group, in, out, &layout, nullptr);
    });
  }
};

std::shared_ptr<Primitive> new_all_gather(Place place) { return std::make_shared<AllGather>(std::move(place)); }

mx::array all_gather(const mx::array& x, SharedConnection connection, mx::StreamOrDevice s, double timeout) {
  if (connection->size() == 1) return x;
  return Primitive::apply(new_all_gather(place_of(std::move(connection), s, timeout)), x);
}

} // namespace mlxdist
