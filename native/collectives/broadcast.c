#include "algorithm.h"
#include "direct.h"
#include "ring.h"
#include "tree.h"

/* A part to each, so that all of them can pass it on: the root sends S bytes and not (n-1) S (van de Geijn 1994). */
static void scatter_parts(struct operation *operation, const struct chunks *chunks, char *data, int32_t root) {
  const mlxdist_group *group = operation_group(operation);
  char *own = data + chunk_offset(chunks, group->rank);
  operation_round(operation);
  if (group->rank != root) operation_receive(operation, root, own, chunk_bytes(chunks, group->rank));
  for (int32_t member = 0; member < group->size && group->rank == root; member++)
    if (member != root)
      operation_send(operation, member, data + chunk_offset(chunks, member), chunk_bytes(chunks, member));
}

int mlxdist_broadcast(mlxdist_group *group, void *data, const mlxdist_layout *layout, int32_t root,
                      mlxdist_call *call) {
  struct operation *operation;
  int status = layout_check("broadcast", layout);
  if (!status) status = check_root(group, "broadcast", root);
  if (!status) status = collective_new(group, "broadcast", MLXDIST_BROADCAST, layout, 0, root, &operation);
  if (status) return status;
  enum mlxdist_algorithm algorithm = algorithm_of(operation);
  uint64_t bytes = layout_bytes(layout);
  struct chunks chunks = {
      .count = layout_count(layout), .element_bytes = mlxdist_dtype_size(layout->dtype), .size = group->size};
  char *own = (char *)data + chunk_offset(&chunks, group->rank);
  if (algorithm == MLXDIST_DIRECT) {
    direct_broadcast(operation, data, bytes, root);
  } else if (algorithm == MLXDIST_TREE) {
    tree_broadcast(operation, data, bytes, root);
  } else if (algorithm == MLXDIST_RING) {
    ring_broadcast(operation, data, bytes, root);
  } else {
    scatter_parts(operation, &chunks, data, root);
    direct_all_gather(operation, &group->everyone, &chunks, own, data);
  }
  return operation_start(operation, call);
}
