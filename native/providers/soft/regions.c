/* See regions.h. */
#include "regions.h"

#include "clock.h"
#include "memory.h"

static void publish(struct shared_region *region, const struct soft_mr *mr, uint64_t offset) {
  region->pd = soft_pd(mr->verbs.pd)->number;
  region->addr = (uint64_t)(uintptr_t)mr->verbs.addr;
  region->length = mr->verbs.length;
  region->offset = offset;
  atomic_store_explicit(&region->key, mr->verbs.rkey, memory_order_release);
}

void soft_publish_region(const struct soft_mr *mr) {
  struct soft_context *context = soft_context(mr->verbs.context);
  struct segment *segment = context->segment;
  if (!segment->layout) return;
  uint64_t addr = (uint64_t)(uintptr_t)mr->verbs.addr;
  bool inside = soft_in_arena(context, addr, mr->verbs.length);
  uint64_t offset = inside ? addr - (uint64_t)(uintptr_t)segment->layout : REGION_OUTSIDE;
  publish(&segment->regions[mr->verbs.handle], mr, offset);
  publish(&segment->layout->regions[mr->verbs.handle], mr, offset);
}

struct writers {
  const struct shared_queue_pair *shared;
  uint64_t before;
};

/* Whether those that were in progress before have ended. A queue pair has one peer, whose next write begins when its
 * last one has ended: who waits need not see the moment between. */
static bool have_ended(const void *copy) {
  const struct writers *writers = copy;
  uint64_t now = atomic_load(&writers->shared->writers);
  uint32_t ended = (uint32_t)(now >> 32) - (uint32_t)(writers->before >> 32);
  return (uint32_t)now == 0 || ended >= (uint32_t)writers->before;
}

bool soft_wait_for_writers(const struct shared_queue_pair *shared) {
  struct writers writers = {shared, atomic_load(&shared->writers)};
  return soft_wait_for_copy(have_ended, &writers);
}

int soft_withdraw_region(const struct soft_mr *mr) {
  struct segment *segment = soft_context(mr->verbs.context)->segment;
  if (!(mr->access & IBV_ACCESS_REMOTE_WRITE) || !segment->layout) return 0;
  atomic_store(&segment->regions[mr->verbs.handle].key, 0);
  atomic_store(&segment->layout->regions[mr->verbs.handle].key, 0);
  for (int i = 0; i < SOFT_MAX_QP; i++)
    if (!soft_wait_for_writers(&segment->layout->queue_pairs[i])) return EBUSY;
  return 0;
}
