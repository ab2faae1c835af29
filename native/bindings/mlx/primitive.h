/*
 * What our own operations on mx.array share: one array in, one out, on a CPU stream. Further inputs are compared with
 * those of other ranks, and have no gradient.
 *
 * A linear operation is differentiated by itself, and its gradient is its adjoint, another of them. So an operation
 * is a class that says what its result looks like, what its adjoint is, and which call of the engine it makes; the
 * rest is here.
 *
 * The operations with a root leave something else on it than elsewhere. They are one primitive on all ranks all the
 * same, with inputs and results of whatever shape: graphs of the same form are evaluated in the same order, which
 * all ranks must agree on.
 */
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "connection.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace mlxdist {

using Arrays = std::vector<mlx::core::array>;

/* Where an operation runs: on a CPU stream, with a group; and what it brings along, which its copies and adjoints have
 * too. */
struct OpContext {
  mlx::core::Stream stream;
  std::shared_ptr<Connection> connection;
  Call call;
};

class Primitive : public mlx::core::Primitive {
 public:
  explicit Primitive(OpContext context)
      : mlx::core::Primitive(context.stream), connection_(std::move(context.connection)), call_(context.call) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) final { evaluate(inputs, outputs[0]); }
  void eval_gpu(const Arrays& inputs, Arrays& outputs) final;
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) final;
  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  std::vector<mlx::core::Shape> output_shapes(const Arrays& inputs) final;

  /* The lazy result of a new primitive. `shape` is that of the result where another than result_shape() is wanted:
   * the adjoint of an operation with a root gives every rank what has the shape of its own input. */
  static mlx::core::array apply(std::shared_ptr<Primitive> primitive, const mlx::core::array& x,
                                std::optional<mlx::core::Shape> shape = std::nullopt, const Arrays& more = {});

 protected:
  /* Gives `out` memory and enqueues the operation. Inputs are row-contiguous. */
  virtual void evaluate(const Arrays& inputs, mlx::core::array& out) = 0;
  virtual std::shared_ptr<Primitive> copy() = 0;
  virtual std::shared_ptr<Primitive> adjoint() { return nullptr; } /* null: not linear */
  virtual mlx::core::Shape result_shape(const mlx::core::Shape& in) const { return in; }
  virtual mlx::core::Dtype result_dtype(mlx::core::Dtype in) const { return in; }

  OpContext context() { return {stream(), connection_, call_}; }
  void enqueue(Connection::Operation operation, int to = MLXDIST_ALL, int from = MLXDIST_ALL) {
    Connection::enqueue(connection_, stream(), call_, {name(), to, from}, std::move(operation));
  }

  const std::shared_ptr<Connection> connection_;
  Call call_;

 private:
  std::shared_ptr<Primitive> require_adjoint();

  std::optional<mlx::core::Shape> shape_; /* of the result, where it is not result_shape() */
};

/* Where MLX would run a communication of its own. MLX and our operations ask for it when a graph is built, so what
 * check() finds is known before anything is evaluated. */
mlx::core::Stream communication_stream(Connection& connection, mlx::core::StreamOrDevice s);
OpContext op_context(std::shared_ptr<Connection> connection, mlx::core::StreamOrDevice s, double timeout,
                     uint64_t label);

/* A call of the engine from `in` to `out`, with the layout of `in` and further arguments, for the thread of a stream.
 */
template <class Function, class... Arguments>
auto call_of(Function* function, const mlx::core::array& in, mlx::core::array& out, Arguments... arguments) {
  return [=, in = data_of(in), out = data_of(out), layout = layout_of(in)](mlxdist_group* group, mlxdist_call* call) {
    return function(group, in, out, &layout, arguments..., call);
  };
}

/* out[i] = op over all ranks of in[i], for MLX's operations and ours. `in` is row-contiguous and may be `out`. */
void enqueue_all_reduce(const OpContext& context, const mlx::core::array& in, mlx::core::array& out, mlxdist_op op);

/* With what else must be equal on all ranks, such as the hash of what an array was packed from, in the dimension that
 * arrays hardly ever have. */
mlxdist_layout with_structure(mlxdist_layout layout, int64_t structure);

/* Gives `out` memory: `allocate` its own, `allocate_like` that of `in` if it fits and has no other reader. `share`
 * gives it that of `in`, or, where a result may not have that, its own: the task calls what comes back before it uses
 * either. */
void allocate(mlx::core::array& out);
void allocate_like(const mlx::core::array& in, mlx::core::array& out);
std::function<void()> share(const mlx::core::array& in, mlx::core::array& out);

/* Shapes along the first axis. A scalar counts as one row. */
mlx::core::Shape times_first(mlx::core::Shape shape, int factor);
mlx::core::Shape with_first(mlx::core::Shape shape, int first);

}  // namespace mlxdist
