/* Memory that peers can reach (alloc_memory), and memory regions. */
#pragma once

#include "soft.h"

int soft_arena_create(struct soft_context* context);
void soft_arena_destroy(struct soft_context* context);
size_t soft_whole_pages(size_t bytes);
void* soft_alloc_memory(struct ibv_context* context, size_t bytes);
void soft_free_memory(struct ibv_context* context, void* memory, size_t bytes);
struct ibv_mr* soft_reg_mr(struct ibv_pd* pd, void* addr, size_t length, int access);
int soft_dereg_mr(struct ibv_mr* mr);
/* The region of `pd` that `lkey` names, if it contains the range and allows `access`; or NULL. */
struct soft_mr* soft_find_mr(const struct ibv_pd* pd, uint32_t lkey, uint64_t addr, uint64_t length, int access);
/* Whether the range lies in memory that peers can reach. */
static inline bool soft_in_arena(const struct soft_context* context, uint64_t addr, uint64_t length) {
  uint64_t start = (uint64_t)(uintptr_t)context->segment->layout + ARENA_OFFSET;
  uint64_t bytes = SEGMENT_BYTES - ARENA_OFFSET;
  return addr >= start && length <= bytes && addr - start <= bytes - length;
}
