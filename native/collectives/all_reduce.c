#include "choose.h"
#include "doubling.h"
#include "mesh.h"
#include "ring.h"
#include "tree.h"

int mlxdist_all_reduce(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout, int32_t op,
                       mlxdist_handle **handle) {
  struct reduction reduction;
  struct operation *operation;
  int status = reduction_prepare(&reduction, "all_reduce", group, layout, op);
  if (status) return status;
  enum mlxdist_algorithm algorithm = choose(group, MLXDIST_ALL_REDUCE, layout);
  struct wire_descriptor descriptor = layout_describe(WIRE_ALL_REDUCE, layout, op, -1, algorithm);
  status = collective_new(group, "all_reduce", &descriptor, &operation);
  if (status) return status;
  char *own = (char *)out + part_offset(&reduction.parts, group->rank);
  if (group->size == 1) {
    operation_round(operation);
    operation_copy(operation, out, in, reduction.bytes);
  } else if (algorithm == MLXDIST_DIRECT) {
    mesh_reduce_all(operation, &reduction, in, out);
  } else if (algorithm == MLXDIST_DOUBLING) {
    doubling_reduce_all(operation, &reduction, in, out);
  } else if (algorithm == MLXDIST_TREE) {
    tree_reduce_all(operation, &reduction, in, out);
  } else if (algorithm == MLXDIST_RING) {
    ring_reduce_parts(operation, &reduction, in, out, own);
    ring_gather_parts(operation, &reduction.parts, own, out);
  } else {
    mesh_reduce_parts(operation, &reduction, in, own);
    mesh_gather_parts(operation, &reduction.parts, own, out);
  }
  return operation_start(operation, handle);
}
