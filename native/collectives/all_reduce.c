#include "mesh.h"

#include <string.h>

/*
 * Two ways, both with bitwise the same result on every rank:
 *  - direct: everybody sends everything to everybody. One message time, (n-1) S bytes a rank. For two ranks
 *    these are the optimum, 2 (n-1)/n S = S, so it is always used for them.
 *  - reduce-scatter, then all-gather: 2 (n-1)/n S bytes a rank, two message times.
 */
#define DIRECT_BYTES (32 << 10)

int mlxdist_all_reduce(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout, int32_t op) {
  uint64_t started;
  fold_kernel kernel = mesh_kernel("all_reduce", layout, op);
  if (!kernel) return MLXDIST_INVALID_ARGUMENT;
  int status = operation_begin(group, "all_reduce", layout, &started);
  if (status) return status;
  uint64_t elements = layout_count(layout), bytes = layout_bytes(layout);
  uint32_t element_bytes = mlxdist_dtype_size(layout->dtype);
  int32_t rank = group->engine.rank, size = group->engine.size;
  struct wire_descriptor descriptor = layout_describe(WIRE_ALL_REDUCE, layout, op, -1);
  if (size == 1) {
    if (out != in) memcpy(out, in, bytes);
  } else if (size == 2 || bytes <= DIRECT_BYTES) {
    status = mesh_reduce_all(group, &descriptor, kernel, in, out, bytes, element_bytes);
  } else {
    char *own = (char *)out + part_of(elements, element_bytes, rank, size).offset;
    status = mesh_reduce_parts(group, &descriptor, kernel, in, own, elements, element_bytes);
    if (!status) status = mesh_gather_parts(group, &descriptor, own, out, elements, element_bytes);
  }
  return operation_end(group, status, started, &group->engine.counters.collectives);
}
