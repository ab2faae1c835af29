#include "algorithm.h"
#include "chunks.h"
#include "ring.h"

static void to_root(struct operation *operation, const char *in, char *out, uint64_t bytes, int32_t root) {
  const mlxdist_group *group = operation_group(operation);
  operation_round(operation);
  if (group->rank != root) {
    operation_send(operation, root, in, bytes);
    return;
  }
  operation_copy(operation, out + bytes * (uint64_t)root, in, bytes);
  for (int32_t member = 0; member < group->size; member++)
    if (member != root) operation_receive(operation, member, out + bytes * (uint64_t)member, bytes);
}

/* To everyone, because everyone passes it on. */
static void around(struct operation *operation, const char *in, char *out, uint64_t bytes, int32_t root) {
  const mlxdist_group *group = operation_group(operation);
  struct chunks chunks = {.count = bytes * (uint64_t)group->size, .element_bytes = 1, .size = group->size};
  if (group->rank != root) out = operation_scratch(operation, chunks.count);
  ring_all_gather(operation, &chunks, in, out);
}

int mlxdist_gather(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout, int32_t root,
                   mlxdist_call *call) {
  struct operation *operation;
  int status = layout_check("gather", layout);
  if (!status) status = check_root(group, "gather", root);
  if (!status) status = collective_new(group, "gather", MLXDIST_GATHER, layout, 0, root, &operation);
  if (status) return status;
  if (algorithm_of(operation) == MLXDIST_RING) {
    around(operation, in, out, layout_bytes(layout), root);
  } else {
    to_root(operation, in, out, layout_bytes(layout), root);
  }
  return operation_start(operation, call);
}
