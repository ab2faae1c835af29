/* Which streams of MLX have operations of groups to carry out. For finding ranks that wait for each other
 * (mlxdist/standstill.py). */
#pragma once

#include "mlx/stream.h"

namespace mlxdist {

/* One task of a stream, as long as it lives. */
class StreamTask {
 public:
  explicit StreamTask(mlx::core::Stream stream);
  ~StreamTask();
  StreamTask(const StreamTask&) = delete;
  StreamTask& operator=(const StreamTask&) = delete;

 private:
  const int stream_;
};

/* The streams that have tasks. */
int busy_streams();

} // namespace mlxdist
