#include "operations.h"

namespace mlxdist {

namespace mx = mlx::core;

/* Joined along the first axis of what it maps, also where that is not the first one: MLX's own joins the mapped axis.
 * Its gradient is that of all ranks' results. */
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

/* With MLX's gradient: this rank's rows of its own cotangent, without communication. */
class AllGatherAsInMlx : public AllGather {
 public:
  using AllGather::AllGather;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>&, const Arrays&) override {
    auto shape = primals[0].shape();
    mx::Shape start(cotangents[0].ndim(), 0), stop = cotangents[0].shape();
    int rows = cotangents[0].shape(0) / connection_->size(); /* not the input's: a mapped scalar has none */
    start[0] = connection_->rank() * rows;
    stop[0] = start[0] + rows;
    return {mx::reshape(mx::slice(cotangents[0], start, stop, stream()), shape, stream())};
  }

 protected:
  std::shared_ptr<Primitive> copy() override { return std::make_shared<AllGatherAsInMlx>(place()); }
};

std::shared_ptr<Primitive> new_all_gather(Place place) { return std::make_shared<AllGather>(std::move(place)); }

mx::array all_gather(const mx::array& x, SharedConnection connection, mx::StreamOrDevice s, double timeout) {
  if (connection->size() == 1) return x;
  return Primitive::apply(new_all_gather(place_of(std::move(connection), s, timeout)), x);
}

mx::array all_gather_as_in_mlx(const mx::array& x, SharedConnection connection, mx::StreamOrDevice s, double timeout) {
  if (connection->size() == 1) return x;
  return Primitive::apply(std::make_shared<AllGatherAsInMlx>(place_of(std::move(connection), s, timeout)), x);
}

}  // namespace mlxdist
