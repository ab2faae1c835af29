/*
 * A native group as MLX's tasks see it: shared by the Python Group, the GroupImpl and the primitives, so that each of
 * them may be the last to go. That of the world is the caller's; those that were split off are owned here, and end
 * with their last user or with the world, whichever comes first.
 */
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "errors.h"
#include "mlx/array.h"
#include "mlx/stream.h"
#include "mlxdist.h"

namespace mlxdist {

/* dtype and shape as the engine takes them; more than six dimensions fold into the sixth. */
mlxdist_layout layout_of(const mlx::core::array& x);

/* That of one row: x without its first dimension. */
mlxdist_layout row_layout_of(const mlx::core::array& x);

/* Where the engine reads or writes `x`. Throws if that is not a multiple of the element's size. */
char* data_of(const mlx::core::array& x);

/* What an operation brings along. */
struct Call {
  double timeout;    /* its deadline in seconds, negative for the group's */
  const char* place; /* where in the program it comes from, a text that stays for ever */
};

class Connection {
 public:
  /* The world: `group` stays the caller's and may be null in a group of one. */
  Connection(mlxdist_group* group, int rank, int size);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  mlxdist_group* group() const { return group_; }

  /* The ranks of `connection` that pass the same color, in the order of their keys; null for a negative color. A
   * negative key stands for the rank. Waits for all ranks. Throws what check() throws. */
  static std::shared_ptr<Connection> split(const std::shared_ptr<Connection>& connection, int color, int key);

  /* Hands `operation` (which returns a mlxdist_status) to the thread of `stream`; the caller does not wait. `timeout`
   * is its deadline in seconds, negative for the group's. Throws what check() throws. */
  using Operation = std::function<int(mlxdist_group*)>;
  static void enqueue(std::shared_ptr<Connection> connection, mlx::core::Stream stream, Call call, Operation operation);

  /* Throws if the group is finalized or has failed, or if this process was forked from the one that made it. */
  void check();

  /* Whether something is enqueued or running, here or in the groups split off if this is the world. */
  bool is_busy();

  /* Errors from now on are for the caller to ask for (mlxdist_group_error), or raised where something is evaluated; no
   * more by themselves. Of the world. */
  void keep_errors();

  /* Waits until nothing is enqueued or running, here and in the groups split off if this is the world, which keeps its
   * errors from now on; false if that took longer than `seconds`. */
  bool drain(double seconds);

  /* Whether an error of any group of this process has been thrown. */
  bool told_error() const;

  /* Waits for the running operation and lets go of the native group: later operations throw. The world first closes
   * the groups split off. */
  void close();

 private:
  class Ticket;
  struct World; /* what the groups of a process share */

  Connection(mlxdist_group* group, std::shared_ptr<World> world);
  mlxdist_group* usable() const;
  void run(Call call, const Operation& operation);
  bool is_idle_until(std::chrono::steady_clock::time_point deadline);
  std::vector<std::shared_ptr<Connection>> groups_to_end();

  mlxdist_group* group_;
  const int rank_;
  const int size_;
  const bool is_world_;
  const std::shared_ptr<World> world_;
  std::shared_mutex closing_; /* guards group_ */
  std::mutex pending_mutex_;
  std::condition_variable drained_;
  int pending_ = 0;
};

} // namespace mlxdist
