/* Memory that peers can reach (alloc_memory), and memory regions. */
#define _POSIX_C_SOURCE 200809L
#include "memory.h"

#include "regions.h"
#include "shared_memory_system.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

size_t soft_whole_pages(size_t bytes) { return (bytes + SEGMENT_PAGE - 1) / SEGMENT_PAGE * SEGMENT_PAGE; }

int soft_arena_create(struct soft_context *context) {
  context->blocks = calloc(1, sizeof *context->blocks);
  if (!context->blocks) return ENOMEM;
  context->blocks->offset = ARENA_OFFSET;
  context->blocks->bytes = SEGMENT_BYTES - ARENA_OFFSET;
  return 0;
}

void soft_arena_destroy(struct soft_context *context) {
  while (context->blocks) {
    struct soft_block *block = context->blocks;
    context->blocks = block->next;
    free(block);
  }
}

/* First fit: a context holds a handful of slabs, freed in the reverse order. */
void *soft_alloc_memory(struct ibv_context *verbs, size_t bytes) {
  struct soft_context *context = soft_context(verbs);
  if (bytes == 0 || bytes > SEGMENT_BYTES || !context->segment->layout) {
    errno = bytes > SEGMENT_BYTES ? ENOMEM : EINVAL;
    return NULL;
  }
  bytes = soft_whole_pages(bytes);
  struct soft_block *block = context->blocks;
  while (block && (block->used || block->bytes < bytes)) block = block->next;
  if (!block) {
    errno = ENOMEM;
    return NULL;
  }
  if (block->bytes > bytes) {
    struct soft_block *rest = calloc(1, sizeof *rest);
    if (!rest) return NULL;
    *rest = (struct soft_block){.offset = block->offset + bytes, .bytes = block->bytes - bytes, .next = block->next};
    block->bytes = bytes;
    block->next = rest;
  }
  block->used = true;
  return (char *)context->segment->layout + block->offset;
}

static void merge_with_next(struct soft_block *block) {
  struct soft_block *next = block->next;
  if (!next || block->used || next->used) return;
  block->bytes += next->bytes;
  block->next = next->next;
  free(next);
}

/* Memory that did not come from soft_alloc_memory with this size is left alone, with EINVAL in errno. */
void soft_free_memory(struct ibv_context *verbs, void *memory, size_t bytes) {
  struct soft_context *context = soft_context(verbs);
  struct segment_layout *layout = context->segment->layout;
  if (!memory || !layout) return; /* a forked child has nothing to give back */
  struct soft_block *previous = NULL;
  struct soft_block *block = context->blocks;
  while (block && (char *)layout + block->offset != (char *)memory) {
    previous = block;
    block = block->next;
  }
  if (!block || !block->used || block->bytes != soft_whole_pages(bytes)) {
    errno = EINVAL;
    return;
  }
  if (context->tainted) return;
  segment_zero_pages(memory, block->bytes);
  block->used = false;
  merge_with_next(block);
  if (previous) merge_with_next(previous);
}

static bool crosses_4_gib(const void *addr, size_t length) {
  return (uint64_t)(uintptr_t)addr >> 32 != ((uint64_t)(uintptr_t)addr + length - 1) >> 32;
}

/* Apple's devices want regions on whole pages, and a program gets those as large as its system says. */
static size_t alignment(const struct soft_context *context) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  size_t strict = context->profile->mr_alignment;
  return context->bounces && page < strict ? page : strict;
}

/* An lkey is the region's place in the table and the number of its registration, so a stale key does not match a
 * later region. The memory is not touched: whether it is there matters when it is used. */
struct ibv_mr *soft_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access) {
  const int remote = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  const int known = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING | remote;
  struct soft_context *context = soft_context(pd->context);
  bool bad_access = (access & ~known) || ((access & remote) && !(access & IBV_ACCESS_LOCAL_WRITE));
  bool bad_range = !addr || length == 0 || (uintptr_t)addr + length < (uintptr_t)addr;
  bool too_far = context->profile->short_regions && crosses_4_gib(addr, length);
  bool too_long = context->profile->max_mr_size && length > context->profile->max_mr_size;
  if (bad_access || bad_range || too_far || too_long || (uintptr_t)addr % alignment(context)) {
    errno = EINVAL;
    return NULL;
  }
  if (context->profile->region_access && access != context->profile->region_access) {
    errno = context->profile->access_error;
    return NULL;
  }
  uint32_t place = context->mr_place;
  while (place < SOFT_MAX_MR && context->mrs[place]) place++;
  context->mr_place = place;
  if (place == SOFT_MAX_MR || context->mr_count == context->profile->max_mr) {
    errno = ENOMEM;
    return NULL;
  }
  struct soft_mr *mr = calloc(1, sizeof *mr);
  if (!mr) return NULL;
  uint32_t key = ++context->mrs_registered * SOFT_MAX_MR + place;
  mr->verbs = (struct ibv_mr){
      .context = pd->context, .pd = pd, .addr = addr, .length = length, .handle = place, .lkey = key, .rkey = key};
  mr->access = access;
  mr->number = context->mrs_registered;
  context->mrs[place] = mr;
  context->mr_count++;
  soft_pd(pd)->users++;
  if (access & IBV_ACCESS_REMOTE_WRITE) soft_publish_region(mr);
  return &mr->verbs;
}

/* Where regions are mapped at RTR: until the queue pair is destroyed. */
static bool is_mapped(const struct soft_mr *mr) {
  const struct soft_context *context = soft_context(mr->verbs.context);
  for (int i = 0; i < SOFT_MAX_QP && !context->profile->late_regions; i++) {
    const struct soft_qp *qp = context->qps[i];
    if (qp && qp->verbs.pd == mr->verbs.pd && mr->number <= qp->last_mr) return true;
  }
  return false;
}

/* EBUSY while receives into the region are outstanding, or if a peer was stopped in the middle of an RDMA_WRITE to it,
 * as it could not be kept from writing there. Where queue pairs map regions, while one is there that has. */
int soft_dereg_mr(struct ibv_mr *verbs) {
  struct soft_mr *mr = soft_mr(verbs);
  struct soft_context *context = soft_context(verbs->context);
  if (mr->receives || is_mapped(mr) || soft_withdraw_region(mr)) return soft_error(EBUSY);
  soft_pd(verbs->pd)->users--;
  context->mrs[verbs->handle] = NULL;
  context->mr_count--;
  if (verbs->handle < context->mr_place) context->mr_place = verbs->handle;
  free(mr);
  return 0;
}

struct soft_mr *soft_find_mr(const struct ibv_pd *pd, uint32_t lkey, uint64_t addr, uint64_t length, int access) {
  struct soft_mr *mr = soft_context(pd->context)->mrs[lkey % SOFT_MAX_MR];
  if (!mr || mr->verbs.lkey != lkey || mr->verbs.pd != pd || (mr->access & access) != access) return NULL;
  uint64_t start = (uint64_t)(uintptr_t)mr->verbs.addr;
  bool contains = addr >= start && length <= mr->verbs.length && addr - start <= mr->verbs.length - length;
  return contains ? mr : NULL;
}
