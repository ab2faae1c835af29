#include "chunks.h"

#include "error.h"
#include "reduce.h"

/* 128-bit products: count * rank may pass 64 bits for arrays that no machine holds, but must not wrap. */
static uint64_t chunk_begin(const struct chunks *chunks, int32_t rank) {
  return (uint64_t)((unsigned __int128)chunks->count * (unsigned)rank / (unsigned)chunks->size);
}

uint64_t chunk_offset(const struct chunks *chunks, int32_t rank) {
  return chunk_begin(chunks, rank) * chunks->element_bytes;
}

uint64_t chunk_bytes(const struct chunks *chunks, int32_t rank) {
  return chunk_offset(chunks, rank + 1) - chunk_offset(chunks, rank);
}

uint64_t chunk_max_bytes(const struct chunks *chunks) {
  uint64_t size = (uint64_t)chunks->size;
  return (chunks->count / size + (chunks->count % size != 0)) * chunks->element_bytes;
}

int reduction_prepare(struct reduction *reduction, const char *name, const mlxdist_group *group,
                      const mlxdist_layout *layout, int32_t op) {
  int status = layout_check(name, layout);
  if (status) return status;
  reduction->kernel = reduce_kernel(layout->dtype, op);
  if (!reduction->kernel)
    return fail(MLXDIST_INVALID_ARGUMENT, "%s: there is no reduction %d of dtype %d", name, op, layout->dtype);
  reduction->chunks = (struct chunks){
      .count = layout_count(layout), .element_bytes = layout_dtype_size(layout->dtype), .size = group->size};
  reduction->bytes = layout_bytes(layout);
  return MLXDIST_OK;
}

int check_root(const mlxdist_group *group, const char *name, int32_t root) {
  if (root >= 0 && root < group->size) return MLXDIST_OK;
  return fail(MLXDIST_INVALID_ARGUMENT, "%s with root %d: the group has ranks 0 to %d", name, root, group->size - 1);
}

int check_divisible(const mlxdist_group *group, const char *name, const mlxdist_layout *layout) {
  if (group->size == 1 || (layout->ndim >= 1 && layout->shape[0] % group->size == 0)) return MLXDIST_OK;
  return fail(MLXDIST_INVALID_ARGUMENT, "%s over %d ranks needs a first dimension that is a multiple of %d, not %lld",
              name, group->size, group->size, layout->ndim ? (long long)layout->shape[0] : 0ll);
}

int check_ring(const mlxdist_group *group, const char *name) {
  if (group->ring) return MLXDIST_OK;
  return fail(MLXDIST_INVALID_ARGUMENT, "%s: the links of the %d ranks make no ring, and do not join every two of them",
              name, group->size);
}
