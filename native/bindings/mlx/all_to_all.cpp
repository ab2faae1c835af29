#include "operations.h"

#include <numeric>

namespace mlxdist {

namespace mx = mlx::core;

/* What i sends to j comes back from j to i: its own adjoint. */
class AllToAll : public Primitive {
 public:
  using Primitive::Primitive;
  const char* name() const override { return "all_to_all"; }

 protected:
  std::shared_ptr<Primitive> copy() override { return std::make_shared<AllToAll>(place()); }
  std::shared_ptr<Primitive> adjoint() override { return copy(); }
  void evaluate(const mx::array& in, mx::array& out) override {
    allocate(out);
    enqueue([in = data_of(in), out = data_of(out), layout = layout_of(in)](mlxdist_group* group) {
      return mlxdist_all_to_all(group, in, out, &layout, nullptr);
    });
  }
};

/* Adjoint to the one with the counts swapped. */
class AllToAllV : public Primitive {
 public:
  AllToAllV(Place place, Counts send_counts, Counts receive_counts)
      : Primitive(std::move(place)), send_counts_(std::move(send_counts)), receive_counts_(std::move(receive_counts)) {}
  const char* name() const override { return "all_to_all_v"; }

 protected:
  std::shared_ptr<Primitive> copy() override {
    return std::make_shared<AllToAllV>(place(), send_counts_, receive_counts_);
  }
  std::shared_ptr<Primitive> adjoint() override {
    return std::make_shared<AllToAllV>(place(), receive_counts_, send_counts_);
  }
  mx::Shape result_shape(const mx::Shape& in) const override {
    return with_first(in, std::accumulate(receive_counts_.begin(), receive_counts_.end(), 0));
  }
  void evaluate(const mx::array& in, mx::array& out) override {
    allocate(out);
    enqueue([in = data_of(in), out = data_of(out), row = row_layout_of(in), send_counts = send_counts_,
             receive_counts = receive_counts_](mlxdist_group* group) {
      return mlxdist_all_to_all_v(group, in, send_counts.data(), out, receive_counts.data(), &row, nullptr);
    });
  }

 private:
  const Counts send_counts_;
  const Counts receive_counts_;
};

mx::array all_to_all(const mx::array& x, SharedConnection connection, mx::StreamOrDevice s, double timeout) {
  if (connection->size() == 1) return x;
  return Primitive::apply(std::make_shared<AllToAll>(place_of(std::move(connection), s, timeout)), x);
}

mx::array all_to_all_v(const mx::array& x, SharedConnection connection, Counts send_counts, Counts receive_counts,
                       mx::StreamOrDevice s, double timeout) {
  if (connection->size() == 1) return x;
  auto place = place_of(std::move(connection), s, timeout);
  return Primitive::apply(
      std::make_shared<AllToAllV>(std::move(place), std::move(send_counts), std::move(receive_counts)), x);
}

}  // namespace mlxdist
