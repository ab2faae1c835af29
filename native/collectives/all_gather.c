#include "algorithm.h"
#include "direct.h"
#include "hierarchical.h"
#include "ring.h"

int mlxdist_all_gather(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout,
                       mlxdist_call *call) {
  struct operation *operation;
  int status = layout_check("all_gather", layout);
  if (!status) status = collective_new(group, "all_gather", MLXDIST_ALL_GATHER, layout, 0, -1, &operation);
  if (status) return status;
  /* Equal chunks: `size` elements of `bytes` bytes would overflow an element size, so count bytes. */
  struct chunks chunks = {
      .count = layout_bytes(layout) * (uint64_t)group->size, .element_bytes = 1, .size = group->size};
  if (algorithm_of(operation) == MLXDIST_RING) {
    ring_all_gather(operation, &chunks, in, out);
  } else if (algorithm_of(operation) == MLXDIST_HIERARCHICAL) {
    hierarchical_all_gather(operation, &chunks, in, out);
  } else {
    direct_all_gather(operation, &group->everyone, &chunks, in, out);
  }
  return operation_start(operation, call);
}
