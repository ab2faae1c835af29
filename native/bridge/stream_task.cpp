#include "stream_task.h"

#include <mutex>
#include <unordered_map>

namespace mlxdist {

/* Never destroyed: MLX's threads outlive the statics. */
static auto& tasks_mutex = *new std::mutex;
static auto& tasks = *new std::unordered_map<int, int>;

StreamTask::StreamTask(mlx::core::Stream stream) : stream_(stream.index) {
  std::lock_guard lock(tasks_mutex);
  tasks[stream_]++;
}

StreamTask::~StreamTask() {
  std::lock_guard lock(tasks_mutex);
  if (--tasks[stream_] == 0) tasks.erase(stream_);
}

int busy_streams() {
  std::lock_guard lock(tasks_mutex);
  return static_cast<int>(tasks.size());
}

} // namespace mlxdist
