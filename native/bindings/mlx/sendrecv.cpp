#include "operations.h"

namespace mlxdist {

namespace mx = mlx::core;

/* MLX's send and recv are two operations, of which one would wait for the other. This is both at once, so that all
 * ranks may do it together. Its adjoint sends the cotangent of what has come back to where it came from. */
class SendRecv : public Primitive {
 public:
  SendRecv(Place place, int to, int from, mx::Dtype sent, mx::Dtype received)
      : Primitive(std::move(place)), to_(to), from_(from), sent_(sent), received_(received) {}
  const char* name() const override { return "sendrecv"; }

 protected:
  std::shared_ptr<Primitive> copy() override {
    return std::make_shared<SendRecv>(place(), to_, from_, sent_, received_);
  }
  std::shared_ptr<Primitive> adjoint() override {
    return std::make_shared<SendRecv>(place(), from_, to_, received_, sent_);
  }
  mx::Dtype result_dtype(mx::Dtype) const override { return received_; }
  void evaluate(const mx::array& in, mx::array& out) override {
    allocate(out);
    enqueue(
        [in = data_of(in), sent = layout_of(in), out = data_of(out), received = layout_of(out), to = to_, from = from_](
            mlxdist_group* group) { return mlxdist_sendrecv(group, in, &sent, to, out, &received, from, nullptr); },
        to_, from_);
  }

 private:
  const int to_;
  const int from_;
  const mx::Dtype sent_;
  const mx::Dtype received_;
};

mx::array sendrecv(const mx::array& x, SharedConnection connection, int to, int from, const std::vector<int>& shape,
                   mx::Dtype dtype, mx::StreamOrDevice s, double timeout) {
  auto place = place_of(std::move(connection), s, timeout);
  return Primitive::apply(std::make_shared<SendRecv>(std::move(place), to, from, x.dtype(), dtype), x,
                          mx::Shape(shape.begin(), shape.end()));
}

}  // namespace mlxdist
