/*
 * A native group as MLX's tasks see it: shared by the Python Group, the GroupImpl and the primitives, so that each of
 * them may be the last to go. That of the world is the caller's; those that were split off are owned here, and end
 * with their last user or with the world, whichever comes first.
 */
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
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

/* Where the engine reads or writes an array. It is an address in the thread of the stream, and not earlier: the address
 * of a buffer that only a GPU has is that of a copy for the CPU, which MLX makes at that moment. The evaluating thread
 * would copy what the GPU has not computed yet; the stream has waited for that. */
class Memory {
 public:
  Memory(mlx::core::allocator::Buffer buffer, int64_t offset) : buffer_(buffer), offset_(offset) {}
  operator void*() const { return static_cast<char*>(mlx::core::allocator::Buffer(buffer_).raw_ptr()) + offset_; }

 private:
  mlx::core::allocator::Buffer buffer_;
  int64_t offset_; /* bytes */
};

/* Throws if the array does not begin at a multiple of the element's size. */
Memory data_of(const mlx::core::array& x);

/* An operation as its peers are to know of it before it is called: its name, and the members that it sends to and
 * receives from (mlxdist_enqueue). */
struct Peers {
  const char* operation;
  int to = MLXDIST_ALL;
  int from = MLXDIST_ALL;
};

/* What an operation is built with. */
struct Call {
  double timeout;        /* its deadline in seconds, negative for the group's */
  const char* call_site; /* a text that is never freed */
  int64_t structure = 0; /* of an all_reduce: see with_structure() */
  uint64_t label = 0;    /* mlxdist_label */
};

/* With it nanobind hands out the one owner that C++ has. Else each call from Python would own the Python object, and
 * let go of it with the interpreter's lock in MLX's thread, for which mx.clear_cache() waits while it holds that lock.
 */
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  /* Of the world: `group` stays the caller's and may be null in a group of one. With the interpreter's lock. */
  static std::shared_ptr<Connection> connect(mlxdist_group* group);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  mlxdist_group* group() const { return group_; }

  /* The ranks of `connection` that pass the same color, in the order of their keys; null for a negative color. A
   * negative key stands for the rank. Waits for all ranks. Throws what check() throws. */
  static std::shared_ptr<Connection> split(const std::shared_ptr<Connection>& connection, int color, int key,
                                           uint64_t label = 0);

  /* Hands `operation` (which returns a mlxdist_status) to the thread of `stream`, with the place that it has in the
   * order of the group from now on. The caller waits only where it has to meet the peers first (mlxdist_enqueue); if
   * they do not come the operation fails, and not this. Throws what check() throws. */
  using Operation = std::function<int(mlxdist_group*, mlxdist_call*)>;
  static void enqueue(std::shared_ptr<Connection> connection, mlx::core::Stream stream, Call call, Peers peers,
                      Operation operation);

  /* Throws if the group is finalized or has failed, or if this process was forked from the one that made it. */
  void check();

  /* Whether something is enqueued or running, here or in the groups split off if this is the world. */
  bool is_busy();

  /* Errors from now on are for the caller to ask for (mlxdist_group_error), or raised where something is evaluated; no
   * more by themselves. Of the world. */
  void defer_errors();

  /* Waits until nothing is enqueued or running, here and in the groups split off if this is the world, which keeps its
   * errors from now on; false if that took longer than `seconds`. */
  bool drain(double seconds);

  /* Whether an error of any group of this process has been thrown. */
  bool error_reported() const;

  /* The world of this process, null where there is none. */
  static std::shared_ptr<Connection> world();

  /* The error of a GPU timeout that a late rank has caused, if one has (mlxdist_group_gpu_timeout). */
  std::optional<Error> explain_gpu_timeout();

  /* Waits for the running operation and lets go of the native group: later operations throw. The world first closes
   * the groups split off. */
  void close();

 private:
  class Ticket;
  struct World; /* what the groups of a process share */

  Connection(mlxdist_group* group, bool is_world, std::shared_ptr<World> world);
  bool is_forked() const;
  std::shared_lock<std::shared_mutex> keep_open(); /* throws in a forked child */
  mlxdist_group* usable() const;                   /* the lock is held */
  void take_place(mlxdist_call& call, Peers peers);
  void leave_void(const char* operation, const std::string& why);
  void run(mlxdist_call& call, const Operation& operation);
  void report(const Error& error);
  bool is_idle_until(std::chrono::steady_clock::time_point deadline);
  std::vector<std::shared_ptr<Connection>> groups_to_end();

  mlxdist_group* group_;
  const int rank_;
  const int size_;
  const int id_;
  const bool is_world_;
  const std::shared_ptr<World> world_;
  std::shared_mutex closing_; /* guards group_ */
  std::mutex pending_mutex_;
  std::condition_variable drained_;
  std::atomic<int> pending_ = 0;
};

}  // namespace mlxdist
