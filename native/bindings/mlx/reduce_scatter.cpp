#include "operations.h"

namespace mlxdist {

namespace mx = mlx::core;

class ReduceScatter : public Primitive {
 public:
  ReduceScatter(Place place, mlxdist_op op)
      : Primitive(std::move(place)), op_(op), name_(name_with("reduce_scatter", op)) {}
  const char* name() const override { return name_.c_str(); }

 protected:
  std::shared_ptr<Primitive> copy() override { return new_reduce_scatter(place(), op_); }
  std::shared_ptr<Primitive> adjoint() override { return op_ == MLXDIST_SUM ? new_all_gather(place()) : nullptr; }
  mx::Shape result_shape(const mx::Shape& in) const override { return with_first(in, in[0] / connection_->size()); }
  void evaluate(const mx::array& in, mx::array& out) override {
    allocate(out);
    enqueue([in = data_of(in), out = data_of(out), layout = layout_of(in), op = op_](mlxdist_group* group) {
      return mlxdist_reduce_scatter(group, in, out, &layout, op, nullptr);
    });
  }

 private:
  const mlxdist_op op_;
  const std::string name_;
};

std::shared_ptr<Primitive> new_reduce_scatter(Place place, mlxdist_op op) {
  return std::make_shared<ReduceScatter>(std::move(place), op);
}

mx::array reduce_scatter(const mx::array& x, SharedConnection connection, int op, mx::StreamOrDevice s,
                         double timeout) {
  if (connection->size() == 1) return x;
  auto place = place_of(std::move(connection), s, timeout);
  return Primitive::apply(new_reduce_scatter(std::move(place), static_cast<mlxdist_op>(op)), x);
}

}  // namespace mlxdist
