#include "algorithm.h"
#include "direct.h"
#include "ring.h"
#include "tree.h"

/* Every rank reduces its part and hands it to the root, which receives (n-1)/n S bytes twice and not (n-1) S. */
static void parts_to_root(struct operation *operation, const struct reduction *reduction, const char *in, char *out,
                          int32_t root) {
  const mlxdist_group *group = operation_group(operation);
  const struct chunks *chunks = &reduction->chunks;
  if (group->rank != root) {
    uint64_t bytes = chunk_bytes(chunks, group->rank);
    char *own = operation_scratch(operation, bytes);
    direct_reduce_scatter(operation, &group->everyone, reduction, in, own);
    operation_round(operation);
    operation_send(operation, root, own, bytes);
    return;
  }
  direct_reduce_scatter(operation, &group->everyone, reduction, in, out + chunk_offset(chunks, root));
  operation_round(operation);
  for (int32_t member = 0; member < group->size; member++)
    if (member != root)
      operation_receive(operation, member, out + chunk_offset(chunks, member), chunk_bytes(chunks, member));
}

/* Around the ring, to everyone: it costs the links no more than to hand all chunks on to the root. */
static void around(struct operation *operation, const struct reduction *reduction, const char *in, char *out,
                   int32_t root) {
  const mlxdist_group *group = operation_group(operation);
  if (group->rank != root) out = operation_scratch(operation, reduction->bytes);
  char *own = out + chunk_offset(&reduction->chunks, group->rank);
  ring_reduce_scatter(operation, reduction, in, out, own);
  ring_all_gather(operation, &reduction->chunks, own, out);
}

int mlxdist_reduce(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout, int32_t op,
                   int32_t root, mlxdist_call *call) {
  struct reduction reduction;
  struct operation *operation;
  int status = reduction_prepare(&reduction, "reduce", group, layout, op);
  if (!status) status = check_root(group, "reduce", root);
  if (!status) status = collective_new(group, "reduce", MLXDIST_REDUCE, layout, op, root, &operation);
  if (status) return status;
  enum mlxdist_algorithm algorithm = algorithm_of(operation);
  if (group->size == 1) {
    operation_round(operation);
    operation_copy(operation, out, in, reduction.bytes);
  } else if (algorithm == MLXDIST_RING) {
    around(operation, &reduction, in, out, root);
  } else if (algorithm == MLXDIST_TREE) {
    tree_reduce(operation, &reduction, in, out, root);
  } else if (algorithm == MLXDIST_MESH) {
    parts_to_root(operation, &reduction, in, out, root);
  } else {
    direct_reduce(operation, &reduction, in, out, root);
  }
  return operation_start(operation, call);
}
