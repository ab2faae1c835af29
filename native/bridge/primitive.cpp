#include "primitive.h"

#include "mlx/allocator.h"

namespace mlxdist {

namespace mx = mlx::core;

void Primitive::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw Error(MLXDIST_INVALID_ARGUMENT,
              std::string(name()) + ": communication runs on the CPU: pass no stream, or a stream of mx.cpu");
}

mx::Stream communication_stream(Connection& connection, mx::StreamOrDevice s) {
  connection.check();
  return mx::to_stream(s, mx::Device::cpu);
}

void enqueue_all_reduce(std::shared_ptr<Connection> connection, const mx::array& in, mx::array& out, mlxdist_op op,
                        mx::Stream stream) {
  Connection::enqueue(std::move(connection), stream,
                      [in = data_of(in), out = data_of(out), layout = layout_of(in), op](mlxdist_group* group) {
                        return mlxdist_all_reduce(group, in, out, &layout, op);
                      });
}

void allocate_like(const mx::array& in, mx::array& out) {
  if (in.is_donatable()) {
    out.copy_shared_buffer(in);
  } else {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }
}

} // namespace mlxdist
