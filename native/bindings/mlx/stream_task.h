/* Which operations of groups the streams of MLX have to carry out. For finding ranks that wait for each other
 * (mlxdist/runtime/diagnostics/deadlock.py). */
#pragma once

#include <cstdint>
#include <vector>

#include "mlx/stream.h"
#include "mlxdist.h"

namespace mlxdist {

/* A task that its stream has not come to: an operation of the group with this id, its members as in mlxdist_enqueue and
 * its places as they travel. `thread` carries out the one that the stream is in: its ident in Python, 0 where that has
 * not begun. */
struct QueuedTask {
  int group, to, from;
  uint32_t place, send, receive;
  uint64_t thread;
};
std::vector<QueuedTask> queued_tasks();

/* The streams that have tasks. */
int busy_streams();

/* One task of a stream, as long as it lives. */
class StreamTask {
 public:
  StreamTask(mlx::core::Stream stream, int group, int to, int from)
      : stream_(stream.index), group_(group), to_(to), from_(from) {}
  ~StreamTask();
  StreamTask(const StreamTask&) = delete;
  StreamTask& operator=(const StreamTask&) = delete;

  /* It has its place in the order of its group from now on. */
  void take_place(const mlxdist_call& call);

  /* In the thread that carries it out. */
  void begin();

 private:
  friend std::vector<QueuedTask> queued_tasks();
  friend int busy_streams();

  const int stream_, group_, to_, from_;
  mlxdist_call call_{};
  uint64_t thread_ = 0; /* that carries it out; 0: none yet */
  bool is_listed_ = false;
  StreamTask *previous_ = nullptr, *next_ = nullptr;
};

}  // namespace mlxdist
