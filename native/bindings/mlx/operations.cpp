#include "operations.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace mlxdist {

namespace mx = mlx::core;

/* What the operations share: `Arguments`, which copies have too, and the function that Python calls. */
template <class Derived, class... Arguments>
class Operation : public Primitive {
 public:
  /* NOLINTNEXTLINE(bugprone-crtp-constructor-accessibility): std::make_shared calls it by `using` */
  explicit Operation(OpContext context, Arguments... arguments)
      : Primitive(std::move(context)), arguments_(std::move(arguments)...) {}

  /* The lazy result. In a group of one it is the input. */
  static mx::array build(const mx::array& x, std::shared_ptr<Connection> connection, Arguments... arguments,
                         mx::StreamOrDevice s, double timeout, uint64_t label) {
    if (connection->size() == 1) return x;
    auto context = op_context(std::move(connection), s, timeout, label);
    return apply(std::make_shared<Derived>(std::move(context), std::move(arguments)...), x);
  }

 protected:
  std::shared_ptr<Primitive> copy() override {
    return std::apply([this](const auto&... arguments) { return this->template make<Derived>(arguments...); },
                      arguments_);
  }
  template <class Other, class... Values>
  std::shared_ptr<Primitive> make(const Values&... arguments) {
    return std::make_shared<Other>(context(), arguments...);
  }
  template <size_t i>
  const auto& argument() const {
    return std::get<i>(arguments_);
  }
  bool is_root(int root) const { return connection_->rank() == root; }

 private:
  const std::tuple<Arguments...> arguments_;
};

constexpr const char* all_reduce_names[] = {"all_reduce (sum)", "all_reduce (max)", "all_reduce (min)",
                                            "all_reduce (prod)"};
constexpr const char* reduce_names[] = {"reduce (sum)", "reduce (max)", "reduce (min)", "reduce (prod)"};
constexpr const char* reduce_scatter_names[] = {"reduce_scatter (sum)", "reduce_scatter (max)", "reduce_scatter (min)",
                                                "reduce_scatter (prod)"};

/* For all but the sum. It has no adjoint: that of MLX's all_sum, the identity, would be wrong for a product, a maximum
 * or a minimum. */
class AllReduce : public Operation<AllReduce, int> {
 public:
  using Operation::Operation;
  const char* name() const override { return all_reduce_names[argument<0>()]; }

 protected:
  void evaluate(const Arrays& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    allocate_like(in, out);
    enqueue_all_reduce(context(), in, out, static_cast<mlxdist_op>(argument<0>()));
  }
};

class ReduceScatter : public Operation<ReduceScatter, int> {
 public:
  using Operation::Operation;
  const char* name() const override { return reduce_scatter_names[argument<0>()]; }

 protected:
  std::shared_ptr<Primitive> adjoint() override;
  mx::Shape result_shape(const mx::Shape& in) const override { return with_first(in, in[0] / connection_->size()); }
  void evaluate(const Arrays& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    allocate(out);
    enqueue(call_of(mlxdist_reduce_scatter, in, out, argument<0>()));
  }
};

/* Joined along the first axis of what it maps, also where that is not the first one: MLX's own joins the mapped axis.
 * Its gradient is that of all ranks' results; or, if the argument is true, MLX's: this rank's rows of its own
 * cotangent, without communication. */
class AllGather : public Operation<AllGather, bool> {
 public:
  using Operation::Operation;
  const char* name() const override { return "all_gather"; }
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    if (!argument<0>()) return Primitive::vjp(primals, cotangents, argnums, outputs);
    mx::Shape start(cotangents[0].ndim(), 0), stop = cotangents[0].shape();
    int rows = cotangents[0].shape(0) / connection_->size(); /* not the input's: a mapped scalar has none */
    start[0] = connection_->rank() * rows;
    stop[0] = start[0] + rows;
    return {mx::reshape(mx::slice(cotangents[0], start, stop, stream()), primals[0].shape(), stream())};
  }

 protected:
  std::shared_ptr<Primitive> adjoint() override { return make<ReduceScatter>(static_cast<int>(MLXDIST_SUM)); }
  mx::Shape result_shape(const mx::Shape& in) const override { return times_first(in, connection_->size()); }
  void evaluate(const Arrays& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    allocate(out);
    enqueue(call_of(mlxdist_all_gather, in, out));
  }
};

std::shared_ptr<Primitive> ReduceScatter::adjoint() {
  return argument<0>() == MLXDIST_SUM ? make<AllGather>(false) : nullptr;
}

/* On other ranks than the root the result has no elements; as a gradient, it has those of the input, all zero. */
class Reduce : public Operation<Reduce, int, int> {
 public:
  using Operation::Operation;
  const char* name() const override { return reduce_names[argument<0>()]; }

 protected:
  std::shared_ptr<Primitive> adjoint() override;
  mx::Shape result_shape(const mx::Shape& in) const override { return is_root(argument<1>()) ? in : with_first(in, 0); }
  void evaluate(const Arrays& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    allocate_like(in, out);
    enqueue([reduce = call_of(mlxdist_reduce, in, out, argument<0>(), argument<1>()), out = data_of(out),
             zeros = is_root(argument<1>()) ? 0 : out.nbytes()](mlxdist_group* group, mlxdist_call* call) {
      int status = reduce(group, call);
      if (zeros > 0) std::memset(out, 0, zeros);
      return status;
    });
  }
};

/* Its adjoint reduces all ranks' cotangents to the root. The other ranks' inputs do not count, so their gradient is
 * zero. Arguments: root, and a hash that must be equal on all ranks (with_structure). */
class Broadcast : public Operation<Broadcast, int, int64_t> {
 public:
  using Operation::Operation;
  const char* name() const override { return "broadcast"; }

 protected:
  std::shared_ptr<Primitive> adjoint() override { return make<Reduce>(static_cast<int>(MLXDIST_SUM), argument<0>()); }
  void evaluate(const Arrays& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    std::function<void()> fill = [] {};
    if (is_root(argument<0>())) {
      fill = share(in, out); /* the root's data is only read */
    } else {
      allocate_like(in, out);
    }
    auto layout = with_structure(layout_of(out), argument<1>());
    enqueue([fill, data = data_of(out), layout, root = argument<0>()](mlxdist_group* group, mlxdist_call* call) {
      fill();
      return mlxdist_broadcast(group, data, &layout, root, call);
    });
  }
};

std::shared_ptr<Primitive> Reduce::adjoint() {
  return argument<0>() == MLXDIST_SUM ? make<Broadcast>(argument<1>(), int64_t{0}) : nullptr;
}

class Scatter : public Operation<Scatter, int> {
 public:
  using Operation::Operation;
  const char* name() const override { return "scatter"; }

 protected:
  std::shared_ptr<Primitive> adjoint() override;
  mx::Shape result_shape(const mx::Shape& in) const override {
    return with_first(in, in.empty() ? 1 : in[0] / connection_->size());
  }
  void evaluate(const Arrays& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    allocate(out);
    enqueue(
        [in = data_of(in), out = data_of(out), layout = layout_of(out), root = argument<0>()](
            mlxdist_group* group, mlxdist_call* call) { return mlxdist_scatter(group, in, out, &layout, root, call); });
  }
};

/* On other ranks than the root as Reduce. */
class Gather : public Operation<Gather, int> {
 public:
  using Operation::Operation;
  const char* name() const override { return "gather"; }

 protected:
  std::shared_ptr<Primitive> adjoint() override { return make<Scatter>(argument<0>()); }
  mx::Shape result_shape(const mx::Shape& in) const override {
    return is_root(argument<0>()) ? times_first(in, connection_->size()) : with_first(in, 0);
  }
  void evaluate(const Arrays& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    allocate(out);
    enqueue([gather = call_of(mlxdist_gather, in, out, argument<0>()), out = data_of(out),
             zeros = is_root(argument<0>()) ? 0 : out.nbytes()](mlxdist_group* group, mlxdist_call* call) {
      if (zeros > 0) std::memset(out, 0, zeros);
      return gather(group, call);
    });
  }
};

std::shared_ptr<Primitive> Scatter::adjoint() { return make<Gather>(argument<0>()); }

/* What i sends to j comes back from j to i: its own adjoint. */
class AllToAll : public Operation<AllToAll> {
 public:
  using Operation::Operation;
  const char* name() const override { return "all_to_all"; }

 protected:
  std::shared_ptr<Primitive> adjoint() override { return copy(); }
  void evaluate(const Arrays& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    allocate(out);
    enqueue(call_of(mlxdist_all_to_all, in, out));
  }
};

/* With the rows to each rank and those from each. Adjoint to the one with the counts swapped. */
using Counts = std::vector<uint64_t>;
class AllToAllV : public Operation<AllToAllV, Counts, Counts> {
 public:
  using Operation::Operation;
  const char* name() const override { return "all_to_all_v"; }

 protected:
  std::shared_ptr<Primitive> adjoint() override { return make<AllToAllV>(argument<1>(), argument<0>()); }
  mx::Shape result_shape(const mx::Shape& in) const override {
    const auto& counts = argument<1>();
    return with_first(in, static_cast<int>(std::accumulate(counts.begin(), counts.end(), uint64_t{0})));
  }
  void evaluate(const Arrays& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    allocate(out);
    enqueue([in = data_of(in), out = data_of(out), row = row_layout_of(in), send_counts = argument<0>(),
             receive_counts = argument<1>()](mlxdist_group* group, mlxdist_call* call) {
      return mlxdist_all_to_all_v(group, in, send_counts.data(), out, receive_counts.data(), &row, call);
    });
  }
};

/* MLX's send and recv are two operations, of which one would wait for the other. This is both at once, so that all
 * ranks may do it together. Its adjoint sends the cotangent of what was received back to the sender. Arguments: to,
 * from, dtype of the input and of the result. */
class SendRecv : public Operation<SendRecv, int, int, mx::Dtype, mx::Dtype> {
 public:
  using Operation::Operation;
  const char* name() const override { return "sendrecv"; }
  static mx::array build(const mx::array& x, std::shared_ptr<Connection> connection, int to, int from,
                         const std::vector<int>& shape, mx::Dtype dtype, mx::StreamOrDevice s, double timeout,
                         uint64_t label) {
    auto context = op_context(std::move(connection), s, timeout, label);
    return apply(std::make_shared<SendRecv>(std::move(context), to, from, x.dtype(), dtype), x,
                 mx::Shape(shape.begin(), shape.end()));
  }

 protected:
  std::shared_ptr<Primitive> adjoint() override {
    return make<SendRecv>(argument<1>(), argument<0>(), argument<3>(), argument<2>());
  }
  mx::Dtype result_dtype(mx::Dtype) const override { return argument<3>(); }
  void evaluate(const Arrays& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    allocate(out);
    const int to = argument<0>(), from = argument<1>();
    enqueue([in = data_of(in), sent = layout_of(in), out = data_of(out), received = layout_of(out), to, from](
                mlxdist_group* group,
                mlxdist_call* call) { return mlxdist_sendrecv(group, in, &sent, to, out, &received, from, call); },
            to, from);
  }
};

static uint64_t mixed(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15;
  return hash ^ (hash >> 32);
}

/* An array that must be equal on all ranks. Made while a graph is evaluated; the rest is for the operation itself, when
 * the array is computed. */
class Content {
 public:
  explicit Content(const mx::array& x, uint64_t also = 0)
      : memory_(x.buffer(), x.offset()), bytes_(x.nbytes()), itemsize_(x.itemsize()) {
    seed_ = mixed(also, static_cast<uint64_t>(x.dtype().val()));
    for (int length : x.shape()) seed_ = mixed(seed_, length);
  }
  uint64_t hash() const {
    uint64_t hash = seed_;
    const char* data = bytes_ > 0 ? this->data() : nullptr;
    for (size_t at = 0; at < bytes_; at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, data + at, std::min(sizeof word, bytes_ - at));
      hash = mixed(hash, word);
    }
    return hash;
  }
  uint64_t size() const { return bytes_ / itemsize_; }
  uint64_t last() const {
    uint64_t element = 0;
    if (bytes_ > 0) std::memcpy(&element, data() + bytes_ - itemsize_, itemsize_);
    return element;
  }

 private:
  const char* data() const {
    const void* address = memory_;
    return static_cast<const char*>(address);
  }

  Memory memory_;
  size_t bytes_, itemsize_;
  uint64_t seed_;
};

/* For with_structure(): of what has been passed to an operation besides its first input. */
static std::vector<Content> contents_of(const Arrays& inputs) { return {inputs.begin() + 1, inputs.end()}; }

static int64_t structure_of(const std::vector<Content>& contents) {
  uint64_t hash = 0;
  for (const auto& content : contents) hash = mixed(hash, content.hash());
  return static_cast<int64_t>(hash >> 2);
}

/* MLX's have no gradient. These are adjoint to each other: the cotangent of a message travels back. The result of a
 * send is its input, whose gradient is what comes back plus the cotangent of that result. What comes back follows the
 * message: its receive has the result as its input. `equal`: arrays of which none is sent, and which both ranks must
 * have alike. */
class Send : public Operation<Send, int> {
 public:
  using Operation::Operation;
  const char* name() const override { return "send"; }
  static mx::array build(const mx::array& x, std::shared_ptr<Connection> connection, int to, mx::StreamOrDevice s,
                         double timeout, uint64_t label, const Arrays& equal) {
    return apply(std::make_shared<Send>(op_context(std::move(connection), s, timeout, label), to), x, std::nullopt,
                 equal);
  }
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>&, const Arrays& outputs) override {
    return {mx::add(cotangents[0], apply(adjoint(), outputs[0], primals[0].shape()))};
  }

 protected:
  std::shared_ptr<Primitive> adjoint() override;
  void evaluate(const Arrays& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    const int to = argument<0>();
    enqueue(
        [fill = share(in, out), in = data_of(in), plain = layout_of(in), contents = contents_of(inputs), to](
            mlxdist_group* group, mlxdist_call* call) {
          fill();
          auto layout = with_structure(plain, structure_of(contents));
          return mlxdist_send(group, in, &layout, to, call);
        },
        to, MLXDIST_NONE);
  }
};

/* Its input is a token, of which nothing is sent: it is what a gradient gets here by. That of the token is zero, once
 * the cotangent of what was received is sent back. Arguments: from, dtype of the result where it is not the token's. */
class Recv : public Operation<Recv, int, std::optional<mx::Dtype>> {
 public:
  using Operation::Operation;
  const char* name() const override { return "recv"; }
  static mx::array build(const mx::array& token, std::shared_ptr<Connection> connection, int from,
                         const std::vector<int>& shape, mx::Dtype dtype, mx::StreamOrDevice s, double timeout,
                         uint64_t label, const Arrays& equal) {
    auto context = op_context(std::move(connection), s, timeout, label);
    return apply(std::make_shared<Recv>(std::move(context), from, dtype), token, mx::Shape(shape.begin(), shape.end()),
                 equal);
  }
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>&, const Arrays& outputs) override {
    auto cotangent = mx::depends({cotangents[0]}, {outputs[0]})[0]; /* which may not need what was received */
    return mx::depends({mx::zeros_like(primals[0])}, {apply(adjoint(), cotangent)});
  }

 protected:
  std::shared_ptr<Primitive> adjoint() override { return make<Send>(argument<0>()); }
  mx::Dtype result_dtype(mx::Dtype in) const override { return argument<1>().value_or(in); }
  void evaluate(const Arrays& inputs, mx::array& out) override {
    allocate(out);
    const int from = argument<0>();
    enqueue(
        [out = data_of(out), plain = layout_of(out), contents = contents_of(inputs), from](mlxdist_group* group,
                                                                                           mlxdist_call* call) {
          auto layout = with_structure(plain, structure_of(contents));
          return mlxdist_recv(group, out, &layout, from, call);
        },
        MLXDIST_NONE, from);
  }
};

std::shared_ptr<Primitive> Send::adjoint() { return make<Recv>(argument<0>(), std::optional<mx::Dtype>()); }

/* Of an input, by which ranks compare it; size and last element are for the error. */
struct Fingerprint {
  uint64_t hash, size, last;
};

/* All ranks of the group have the same table, so all of them fail, with the same text. */
static int require_equal(mlxdist_group* group, const std::vector<Fingerprint>& all, const std::string& advice) {
  auto differs = [&all](const Fingerprint& one) { return one.hash != all[0].hash; };
  auto other = std::find_if(all.begin(), all.end(), differs);
  if (other == all.end()) return MLXDIST_OK;
  std::vector<int32_t> ranks(all.size());
  mlxdist_flight_members(group, mlxdist_group_id(group), ranks.data(), ranks.size());
  auto described = [](int32_t rank, const Fingerprint& one) {
    return std::to_string(one.size) + (one.size == 1 ? " element" : " elements") + " that end with " +
           std::to_string(one.last) + " on rank " + std::to_string(rank);
  };
  auto text = "ranks call the model that they share with different inputs, " + described(ranks[0], all[0]) + " and " +
              described(ranks[other - all.begin()], *other) + ": " + advice;
  mlxdist_group_fail(group, MLXDIST_MISMATCH, text.c_str());
  return mlxdist_group_error(group);
}

/* The input itself, once all ranks are known to have the same: a message of 24 bytes to each. Arguments: what must be
 * equal besides, and, for the error, what to do. */
class RequireEqual : public Operation<RequireEqual, int64_t, std::string> {
 public:
  using Operation::Operation;
  const char* name() const override { return "require_equal"; }
  Arrays jvp(const Arrays&, const Arrays& tangents, const std::vector<int>&) override { return tangents; }
  Arrays vjp(const Arrays&, const Arrays& cotangents, const std::vector<int>&, const Arrays&) override {
    return cotangents;
  }

 protected:
  void evaluate(const Arrays& inputs, mx::array& out) override {
    enqueue([fill = share(inputs[0], out), content = Content(inputs[0], argument<0>()), size = connection_->size(),
             advice = argument<1>()](mlxdist_group* group, mlxdist_call* call) {
      fill();
      Fingerprint own{content.hash(), content.size(), content.last()};
      std::vector<Fingerprint> all(size);
      mlxdist_layout layout{MLXDIST_UINT64, 1, {sizeof own / sizeof(uint64_t)}};
      int status = mlxdist_all_gather(group, &own, all.data(), &layout, call);
      return status == MLXDIST_OK ? require_equal(group, all, advice) : status;
    });
  }
};

void define_operations(nb::module_& m) {
  auto define = [&m](const char* name, auto build, auto... arguments) {
    m.def(name, build, nb::arg("x"), nb::arg("connection"), nb::arg(arguments)..., nb::arg("stream") = nb::none(),
          nb::arg("timeout") = -1.0, nb::arg("label") = 0);
  };
  define("all_reduce", &AllReduce::build, "op");
  define("all_gather", &AllGather::build, "mlx_gradient");
  define("reduce_scatter", &ReduceScatter::build, "op");
  m.def(
      "broadcast",
      [](const mx::array& x, std::shared_ptr<Connection> connection, int root, mx::StreamOrDevice s, double timeout,
         uint64_t label,
         int64_t structure) { return Broadcast::build(x, std::move(connection), root, structure, s, timeout, label); },
      nb::arg("x"), nb::arg("connection"), nb::arg("root"), nb::arg("stream") = nb::none(), nb::arg("timeout") = -1.0,
      nb::arg("label") = 0, nb::arg("structure") = 0);
  define("reduce", &Reduce::build, "op", "root");
  define("gather", &Gather::build, "root");
  define("scatter", &Scatter::build, "root");
  define("all_to_all", &AllToAll::build);
  define("all_to_all_v", &AllToAllV::build, "send_counts", "receive_counts");
  define("sendrecv", &SendRecv::build, "to", "from", "shape", "dtype");
  m.def("send", &Send::build, nb::arg("x"), nb::arg("connection"), nb::arg("to"), nb::arg("stream") = nb::none(),
        nb::arg("timeout") = -1.0, nb::arg("label") = 0, nb::arg("equal") = Arrays());
  m.def("recv", &Recv::build, nb::arg("token"), nb::arg("connection"), nb::arg("from"), nb::arg("shape"),
        nb::arg("dtype"), nb::arg("stream") = nb::none(), nb::arg("timeout") = -1.0, nb::arg("label") = 0,
        nb::arg("equal") = Arrays());
  define("require_equal", &RequireEqual::build, "also", "advice");
}

}  // namespace mlxdist
