#include "primitive.h"

#include <cstring>

#include "call_site.h"
#include "mlx/allocator.h"
#include "mlx/backend/cuda/cuda.h"

namespace mlxdist {

namespace mx = mlx::core;

void Primitive::eval_gpu(const Arrays&, Arrays&) {
  throw Error(MLXDIST_INVALID_ARGUMENT,
              std::string(name()) + ": communication runs on the CPU: pass no stream, or a stream of mx.cpu");
}

mx::array Primitive::apply(std::shared_ptr<Primitive> primitive, const mx::array& x, std::optional<mx::Shape> shape,
                           const Arrays& more) {
  auto result = primitive->result_shape(x.shape());
  if (shape && *shape != result) primitive->shape_ = result = *shape;
  auto dtype = primitive->result_dtype(x.dtype());
  Arrays inputs{mx::contiguous(x, false, primitive->stream())};
  for (const auto& one : more) inputs.push_back(mx::contiguous(one, false, primitive->stream()));
  return mx::array(std::move(result), dtype, std::move(primitive), std::move(inputs));
}

/* The mapped axis becomes the second one on every rank, whatever it was: the first is what operations cut and join.
 * Scalars become vectors; where a scalar has a row in a result, or a row becomes one, the axes lie one apart. */
std::pair<Arrays, std::vector<int>> Primitive::vmap(const Arrays& inputs, const std::vector<int>& axes) {
  const auto& x = inputs[0];
  int length = x.shape(axes[0]);
  auto shape = x.shape();
  shape.erase(shape.begin() + axes[0]);
  auto result = shape_ ? *shape_ : result_shape(shape);
  int more = static_cast<int>(result.size()) - static_cast<int>(shape.size());
  int axis = more > 0 || shape.empty() ? 0 : 1;
  int result_axis = axis + more;
  result.insert(result.begin() + result_axis, length);
  return {{apply(copy(), mx::moveaxis(x, axes[0], axis, stream()), result)}, {result_axis}};
}

Arrays Primitive::jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>&) {
  require_adjoint();
  return {apply(copy(), tangents[0], shape_ ? *shape_ : result_shape(primals[0].shape()))};
}

Arrays Primitive::vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>&, const Arrays&) {
  return {apply(require_adjoint(), cotangents[0], primals[0].shape())};
}

std::shared_ptr<Primitive> Primitive::require_adjoint() {
  auto result = adjoint();
  if (!result) {
    throw Error(MLXDIST_INVALID_ARGUMENT, std::string(name()) + " has no gradient: only the sum has one");
  }
  result->call_.label = mlxdist_label_of_adjoint(call_.label);
  return result;
}

std::vector<mx::Shape> Primitive::output_shapes(const Arrays& inputs) {
  if (shape_) return mx::Primitive::output_shapes(inputs); /* throws: compile it with shapes */
  return {result_shape(inputs[0].shape())};
}

mx::Stream communication_stream(Connection& connection, mx::StreamOrDevice s) {
  connection.check();
  return mx::to_stream(s, mx::Device::cpu);
}

OpContext op_context(std::shared_ptr<Connection> connection, mx::StreamOrDevice s, double timeout, uint64_t label) {
  auto stream = communication_stream(*connection, s);
  return {stream, std::move(connection), {timeout, current_call_site().exact, 0, label}};
}

mlxdist_layout with_structure(mlxdist_layout layout, int64_t structure) {
  constexpr int last = static_cast<int>(std::size(layout.shape)) - 1;
  if (layout.ndim <= last) layout.shape[last] = structure;
  return layout;
}

void enqueue_all_reduce(const OpContext& context, const mx::array& in, mx::array& out, mlxdist_op op) {
  constexpr const char* names[] = {"all_sum", "all_max", "all_min", "all_reduce (prod)"};
  auto layout = with_structure(layout_of(in), context.call.structure);
  Connection::enqueue(context.connection, context.stream, context.call, {names[op]},
                      [in = data_of(in), out = data_of(out), layout, op](mlxdist_group* group, mlxdist_call* call) {
                        return mlxdist_all_reduce(group, in, out, &layout, op, call);
                      });
}

void allocate(mx::array& out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

/* On CUDA an input may be in a buffer that only the GPU has. MLX (0.32.4) raises an error where a GPU stream reads the
 * result of a CPU stream in such a buffer, and the evaluating thread cannot move it: the GPU may still write to it. */
static bool results_share_memory() {
  static const bool share = !mx::cu::is_available();
  return share;
}

void allocate_like(const mx::array& in, mx::array& out) {
  if (results_share_memory() && in.is_donatable() && in.shape() == out.shape() && in.dtype() == out.dtype()) {
    out.copy_shared_buffer(in);
  } else {
    allocate(out);
  }
}

std::function<void()> share(const mx::array& in, mx::array& out) {
  if (results_share_memory()) {
    out.copy_shared_buffer(in);
    return [] {};
  }
  allocate(out);
  return [from = data_of(in), to = data_of(out), bytes = in.nbytes()] {
    if (bytes > 0) std::memcpy(to, from, bytes);
  };
}

mx::Shape times_first(mx::Shape shape, int factor) {
  if (shape.empty()) return {factor};
  shape[0] *= factor;
  return shape;
}

mx::Shape with_first(mx::Shape shape, int first) {
  if (shape.empty()) return {first};
  shape[0] = first;
  return shape;
}

}  // namespace mlxdist
