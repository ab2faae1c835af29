#include "stream_task.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include <pthread.h>

namespace mlxdist {

/* All that have their place, in the order in which they were listed: of one stream, that of its tasks. Linked by
 * themselves: every operation makes one. Never destroyed: MLX's threads outlive the statics. */
static auto& tasks_mutex = *new std::mutex;
static StreamTask* first_task;
static StreamTask* last_task;

StreamTask::~StreamTask() {
  std::lock_guard lock(tasks_mutex);
  if (!is_listed_) return;
  (previous_ == nullptr ? first_task : previous_->next_) = next_;
  (next_ == nullptr ? last_task : next_->previous_) = previous_;
}

void StreamTask::take_place(const mlxdist_call& call) {
  std::lock_guard lock(tasks_mutex);
  call_ = call;
  is_listed_ = true;
  previous_ = last_task;
  (last_task == nullptr ? first_task : last_task->next_) = this;
  last_task = this;
}

void StreamTask::begin() {
  pthread_t self = pthread_self(); /* a number or a pointer */
  std::lock_guard lock(tasks_mutex);
  std::memcpy(&thread_, &self, std::min(sizeof self, sizeof thread_));
}

std::vector<QueuedTask> queued_tasks() {
  std::lock_guard lock(tasks_mutex);
  std::vector<QueuedTask> queued;
  std::unordered_map<int, uint64_t> threads; /* of each stream: that of its first task */
  for (const auto* task = first_task; task != nullptr; task = task->next_) {
    uint64_t thread = threads.try_emplace(task->stream_, task->thread_).first->second;
    const auto& call = task->call_;
    if (task->thread_ == 0 && call.enqueued)
      queued.push_back({task->group_, task->to_, task->from_, mlxdist_place_on_wire(call.place),
                        mlxdist_place_on_wire(call.send), mlxdist_place_on_wire(call.receive), thread});
  }
  return queued;
}

int busy_streams() {
  std::lock_guard lock(tasks_mutex);
  std::unordered_set<int> streams;
  for (const auto* task = first_task; task != nullptr; task = task->next_) streams.insert(task->stream_);
  return static_cast<int>(streams.size());
}

}  // namespace mlxdist
