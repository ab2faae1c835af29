/* Which operations of groups the streams of MLX have to carry out. For finding ranks that wait for each other
 * (mlxdist/runtime/deadlock.py). */
#pragma once

#include <cstdint>
#include <vector>

#include "mlx/stream.h"

namespace mlxdist {

/* A task that its stream comes to after the one that `thread` carries out: an operation of the group with this id, and
 * its members as in mlxdist_arrive. */
struct QueuedTask {
  int group, to, from;
  uint64_t thread; /* its ident in Python */
};
std::vector<QueuedTask> queued_tasks();

/* One task of a stream, as long as it lives. */
class StreamTask {
 public:
  StreamTask(mlx::core::Stream stream, int group, int to, int from);
  ~StreamTask();
  StreamTask(const StreamTask&) = delete;
  StreamTask& operator=(const StreamTask&) = delete;

  /* In the thread that carries it out. */
  void begin();

 private:
  friend std::vector<QueuedTask> queued_tasks();

  const int stream_, group_, to_, from_;
  uint64_t thread_ = 0; /* that carries it out; 0: none yet */
};

/* The streams that have tasks. */
int busy_streams();

}  // namespace mlxdist
