#include "stream_task.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <mutex>
#include <unordered_map>

#include <pthread.h>

namespace mlxdist {

/* Never destroyed: MLX's threads outlive the statics. */
static auto& tasks_mutex = *new std::mutex;
static auto& tasks = *new std::unordered_map<int, std::list<const StreamTask*>>; /* in the order of their stream */

StreamTask::StreamTask(mlx::core::Stream stream, int group, int to, int from)
    : stream_(stream.index), group_(group), to_(to), from_(from) {
  std::lock_guard lock(tasks_mutex);
  tasks[stream_].push_back(this);
}

StreamTask::~StreamTask() {
  std::lock_guard lock(tasks_mutex);
  auto& queue = tasks[stream_];
  queue.erase(std::find(queue.begin(), queue.end(), this)); /* the first, but for one that was never dispatched */
  if (queue.empty()) tasks.erase(stream_);
}

void StreamTask::take_place(const mlxdist_call& call) {
  std::lock_guard lock(tasks_mutex);
  call_ = call;
}

void StreamTask::begin() {
  pthread_t self = pthread_self(); /* a number or a pointer */
  std::lock_guard lock(tasks_mutex);
  std::memcpy(&thread_, &self, std::min(sizeof self, sizeof thread_));
}

std::vector<QueuedTask> queued_tasks() {
  std::lock_guard lock(tasks_mutex);
  std::vector<QueuedTask> queued;
  for (const auto& [stream, queue] : tasks) {
    uint64_t thread = queue.front()->thread_;
    for (const auto* task : queue) {
      const auto& call = task->call_;
      if (task->thread_ == 0 && call.enqueued)
        queued.push_back({task->group_, task->to_, task->from_, mlxdist_place_on_wire(call.place),
                          mlxdist_place_on_wire(call.send), mlxdist_place_on_wire(call.receive), thread});
    }
  }
  return queued;
}

int busy_streams() {
  std::lock_guard lock(tasks_mutex);
  return static_cast<int>(tasks.size());
}

}  // namespace mlxdist
