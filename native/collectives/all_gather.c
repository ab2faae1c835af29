#include "mesh.h"

#include <string.h>

int mlxdist_all_gather(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout) {
  uint64_t started;
  int status = operation_begin(group, "all_gather", layout, &started);
  if (status) return status;
  int32_t rank = group->engine.rank, size = group->engine.size;
  uint64_t bytes = layout_bytes(layout);
  struct wire_descriptor descriptor = layout_describe(WIRE_ALL_GATHER, layout, 0, -1);
  /* Equal parts: `size` elements of `bytes` bytes would overflow an element size, so count bytes. */
  if (size > 1) status = mesh_gather_parts(group, &descriptor, in, out, bytes * (uint64_t)size, 1);
  char *own = (char *)out + bytes * (uint64_t)rank;
  if (!status && own != (const char *)in && bytes) memcpy(own, in, bytes);
  return operation_end(group, status, started, &group->engine.counters.collectives);
}
