#include "parts.h"

#include "reduce.h"
#include "ring.h"

/* 128-bit products: count * rank may pass 64 bits for arrays that no machine holds, but must not wrap. */
static uint64_t part_begin(const struct parts *parts, int32_t rank) {
  return (uint64_t)((unsigned __int128)parts->count * (unsigned)rank / (unsigned)parts->size);
}

uint64_t part_offset(const struct parts *parts, int32_t rank) { return part_begin(parts, rank) * parts->element_bytes; }

uint64_t part_bytes(const struct parts *parts, int32_t rank) {
  return part_offset(parts, rank + 1) - part_offset(parts, rank);
}

uint64_t part_most_bytes(const struct parts *parts) {
  uint64_t size = (uint64_t)parts->size;
  return (parts->count / size + (parts->count % size != 0)) * parts->element_bytes;
}

int reduction_prepare(struct reduction *reduction, const char *name, const mlxdist_group *group,
                      const mlxdist_layout *layout, int32_t op) {
  int status = layout_check(name, layout);
  if (status) return status;
  reduction->kernel = reduce_kernel(layout->dtype, op);
  if (!reduction->kernel)
    return fail(MLXDIST_INVALID_ARGUMENT, "%s: there is no reduction %d of dtype %d", name, op, layout->dtype);
  reduction->parts = (struct parts){
      .count = layout_count(layout), .element_bytes = mlxdist_dtype_size(layout->dtype), .size = group->size};
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

int collective_new(mlxdist_group *group, const char *name, const struct wire_descriptor *descriptor,
                   struct operation **operation) {
  int status = descriptor->algorithm == MLXDIST_RING ? ring_check(group, name) : MLXDIST_OK;
  return status ? status : operation_new(group, descriptor, operation);
}
