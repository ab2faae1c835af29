/*
 * The native group as MLX's tasks see it: shared by the Python Group, the GroupImpl and the primitives,
 * so that each of them may be the last to go.
 */
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include <sys/types.h>

#include "errors.h"
#include "mlx/array.h"
#include "mlx/stream.h"
#include "mlxdist.h"

namespace mlxdist {

/* dtype and shape as the engine takes them; more than six dimensions fold into the sixth. */
mlxdist_layout layout_of(const mlx::core::array& x);

/* Where the engine reads or writes `x`. Throws if that is not a multiple of the element's size. */
char* data_of(const mlx::core::array& x);

class Connection {
 public:
  /* `group` stays the caller's and may be null in a group of one. */
  Connection(mlxdist_group* group, int rank, int size);

  int rank() const { return rank_; }
  int size() const { return size_; }

  /* Hands `operation` (which returns a mlxdist_status) to the thread of `stream`; the caller does not wait.
   * Throws what check() throws. */
  using Operation = std::function<int(mlxdist_group*)>;
  static void enqueue(std::shared_ptr<Connection> connection, mlx::core::Stream stream, Operation operation);

  /* Throws if the group is finalized or has failed, or if this process was forked from the one that made it. */
  void check();

  /* Waits until nothing is enqueued or running; false if that took longer than `seconds`. Errors from now on are
   * for the caller to ask for (mlxdist_group_error). */
  bool drain(double seconds);

  /* Waits for the running operation and lets go of the native group: later operations throw. */
  void close();

 private:
  class Ticket;
  mlxdist_group* usable() const;
  void run(const Operation& operation);

  mlxdist_group* group_;
  const int rank_;
  const int size_;
  const pid_t process_; /* queue pairs do not survive a fork */
  std::shared_mutex closing_; /* guards group_ */
  std::atomic<bool> reports_errors_ = true; /* until the first error, or until finalize() looks for itself */
  std::mutex pending_mutex_;
  std::condition_variable drained_;
  int pending_ = 0;
};

} // namespace mlxdist
