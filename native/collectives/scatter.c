#include "algorithm.h"
#include "chunks.h"
#include "ring.h"

static void from_root(struct operation *operation, const char *in, char *out, uint64_t bytes, int32_t root) {
  const mlxdist_group *group = operation_group(operation);
  operation_round(operation);
  if (group->rank != root) {
    operation_receive(operation, root, out, bytes);
    return;
  }
  for (int32_t member = 0; member < group->size; member++)
    if (member != root) operation_send(operation, member, in + bytes * (uint64_t)member, bytes);
  operation_round(operation); /* `out` may be where a part lay that has to leave first */
  operation_copy(operation, out, in + bytes * (uint64_t)root, bytes);
}

/* Everything to everyone, who takes its part. */
static void around(struct operation *operation, char *in, char *out, uint64_t bytes, int32_t root) {
  const mlxdist_group *group = operation_group(operation);
  uint64_t all = bytes * (uint64_t)group->size;
  if (group->rank != root) in = operation_scratch(operation, all);
  ring_broadcast(operation, in, all, root);
  operation_round(operation);
  operation_copy(operation, out, in + bytes * (uint64_t)group->rank, bytes);
}

int mlxdist_scatter(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout, int32_t root,
                    mlxdist_call *call) {
  struct operation *operation;
  int status = layout_check("scatter", layout);
  if (!status) status = check_root(group, "scatter", root);
  if (!status) status = collective_new(group, "scatter", MLXDIST_SCATTER, layout, 0, root, &operation);
  if (status) return status;
  if (algorithm_of(operation) == MLXDIST_RING) {
    around(operation, (char *)in, out, layout_bytes(layout), root);
  } else {
    from_root(operation, in, out, layout_bytes(layout), root);
  }
  return operation_start(operation, call);
}
