/* What the collectives share: how they begin, the chunks of an array that belong to ranks, kernels. */
#pragma once

#include "start.h"

/* An array of `count` elements, cut into one part per rank: chunks differ by one element at most. */
struct chunks {
  uint64_t count;
  uint32_t element_bytes;
  int32_t size;
};
uint64_t chunk_offset(const struct chunks* chunks, int32_t rank); /* in bytes */
uint64_t chunk_bytes(const struct chunks* chunks, int32_t rank);
uint64_t chunk_max_bytes(const struct chunks* chunks);

/* A reduction of an array: its kernel and its chunks. */
struct reduction {
  reduce_function kernel;
  struct chunks chunks;
  uint64_t bytes; /* of the whole array */
};

/* INVALID_ARGUMENT for a wrong layout, and for a reduction that does not exist. */
int reduction_prepare(struct reduction* reduction, const char* name, const mlxdist_group* group,
                      const mlxdist_layout* layout, int32_t op);

/* INVALID_ARGUMENT where the links of the group make no ring. */
int check_ring(const mlxdist_group* group, const char* name);

int check_root(const mlxdist_group* group, const char* name, int32_t root);

/* The first dimension of `layout` must be a multiple of the group's size. */
int check_divisible(const mlxdist_group* group, const char* name, const mlxdist_layout* layout);

/* What arrives in the round is reduced into `out` together with `own`, behind `position` of the transfers. `in_place`:
 * `out` is what is being sent. */
static inline void reduction_add(struct operation* operation, const struct reduction* reduction, const char* own,
                                 int position, char* out, bool in_place) {
  operation_reduce(operation, (struct reduce_step){.kernel = reduction->kernel,
                                                   .element_bytes = reduction->chunks.element_bytes,
                                                   .own = own,
                                                   .own_position = position,
                                                   .out = out,
                                                   .in_place = in_place});
}
