#include "operations.h"

#include <cstring>

namespace mlxdist {

namespace mx = mlx::core;

/* Elsewhere than on the root the result has no elements; as a gradient, it has those of the input, all zero. */
class Reduce : public Primitive {
 public:
  Reduce(Place place, mlxdist_op op, int root)
      : Primitive(std::move(place)), op_(op), root_(root), name_(name_with("reduce", op)) {}
  const char* name() const override { return name_.c_str(); }

 protected:
  std::shared_ptr<Primitive> copy() override { return new_reduce(place(), op_, root_); }
  std::shared_ptr<Primitive> adjoint() override { return op_ == MLXDIST_SUM ? new_broadcast(place(), root_) : nullptr; }
  mx::Shape result_shape(const mx::Shape& in) const override { return is_root() ? in : with_first(in, 0); }
  void evaluate(const mx::array& in, mx::array& out) override {
    allocate_like(in, out);
    enqueue([in = data_of(in), out = data_of(out), layout = layout_of(in), op = op_, root = root_,
             zeros = is_root() ? 0 : out.nbytes()](mlxdist_group* group) {
      int status = mlxdist_reduce(group, in, out, &layout, op, root, nullptr);
      if (zeros > 0) std::memset(out, 0, zeros);
      return status;
    });
  }

 private:
  bool is_root() const { return connection_->rank() == root_; }

  const mlxdist_op op_;
  const int root_;
  const std::string name_;
};

std::shared_ptr<Primitive> new_reduce(Place place, mlxdist_op op, int root) {
  return std::make_shared<Reduce>(std::move(place), op, root);
}

mx::array reduce(const mx::array& x, SharedConnection connection, int op, int root, mx::StreamOrDevice s,
                 double timeout) {
  if (connection->size() == 1) return x;
  auto place = place_of(std::move(connection), s, timeout);
  return Primitive::apply(new_reduce(std::move(place), static_cast<mlxdist_op>(op), root), x);
}

}  // namespace mlxdist
