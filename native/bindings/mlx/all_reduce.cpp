#include "operations.h"

namespace mlxdist {

namespace mx = mlx::core;

/* It has no adjoint: that of MLX's all_sum, the identity, would be wrong for a product, a maximum or a minimum. */
class AllReduce : public Primitive {
 public:
  AllReduce(Place place, mlxdist_op op) : Primitive(std::move(place)), op_(op), name_(name_with("all_reduce", op)) {}
  const char* name() const override { return name_.c_str(); }

 protected:
  std::shared_ptr<Primitive> copy() override { return std::make_shared<AllReduce>(place(), op_); }
  void evaluate(const mx::array& in, mx::array& out) override {
    allocate_like(in, out);
    enqueue_all_reduce(place(), in, out, op_);
  }

 private:
  const mlxdist_op op_;
  const std::string name_;
};

mx::array all_reduce(const mx::array& x, SharedConnection connection, int op, mx::StreamOrDevice s, double timeout) {
  if (connection->size() == 1) return x;
  auto place = place_of(std::move(connection), s, timeout);
  return Primitive::apply(std::make_shared<AllReduce>(std::move(place), static_cast<mlxdist_op>(op)), x);
}

}  // namespace mlxdist
