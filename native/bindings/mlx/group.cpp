#include "group.h"

#include "call_site.h"
#include "primitive.h"

namespace mlxdist {

namespace mx = mlx::core;

/* MLX calls these while it walks a graph: they take the addresses and enqueue. The arrays stay alive until
 * their task has ended, which MLX sees to; inputs are row-contiguous, and `out` may be `in`. Where in the program they
 * come from is not known: the interpreter's lock, without which MLX evaluates, may be held for milliseconds, or by a
 * thread that waits for this one. What this thread noted last, when it built one, is near. */

mx::Stream Group::communication_stream(mx::StreamOrDevice s) {
  note_call_site();
  return mlxdist::communication_stream(*connection_, s);
}

std::shared_ptr<mx::distributed::detail::GroupImpl> Group::split(int color, int key) {
  auto part = Connection::split(connection_, color, key);
  if (part) return std::make_shared<Group>(std::move(part), timeout_);
  throw Error(MLXDIST_INVALID_ARGUMENT,
              "split: rank " + std::to_string(rank()) + " passes color " + std::to_string(color) +
                  " and so is in no "
                  "group, for which mx.distributed has no word: use mlxdist.Group.split, which returns None");
}

Call Group::call() const { return {timeout_, noted_call_site().near, structure_, label_}; }

void Group::all_sum(const mx::array& in, mx::array& out, mx::Stream stream) {
  enqueue_all_reduce({stream, connection_, call()}, in, out, MLXDIST_SUM);
}

void Group::all_max(const mx::array& in, mx::array& out, mx::Stream stream) {
  enqueue_all_reduce({stream, connection_, call()}, in, out, MLXDIST_MAX);
}

void Group::all_min(const mx::array& in, mx::array& out, mx::Stream stream) {
  enqueue_all_reduce({stream, connection_, call()}, in, out, MLXDIST_MIN);
}

void Group::all_gather(const mx::array& in, mx::array& out, mx::Stream stream) {
  Connection::enqueue(connection_, stream, call(), {"all_gather"}, call_of(mlxdist_all_gather, in, out));
}

void Group::sum_scatter(const mx::array& in, mx::array& out, mx::Stream stream) {
  auto scatter = call_of(mlxdist_reduce_scatter, in, out, MLXDIST_SUM);
  Connection::enqueue(connection_, stream, call(), {"sum_scatter"}, std::move(scatter));
}

void Group::send(const mx::array& in, int dst, mx::Stream stream) {
  Connection::enqueue(connection_, stream, call(), {"send", dst, MLXDIST_NONE},
                      [in = data_of(in), layout = layout_of(in), dst](mlxdist_group* group, mlxdist_call* call) {
                        return mlxdist_send(group, in, &layout, dst, call);
                      });
}

void Group::recv(mx::array& out, int src, mx::Stream stream) {
  Connection::enqueue(connection_, stream, call(), {"recv", MLXDIST_NONE, src},
                      [out = data_of(out), layout = layout_of(out), src](mlxdist_group* group, mlxdist_call* call) {
                        return mlxdist_recv(group, out, &layout, src, call);
                      });
}

}  // namespace mlxdist
