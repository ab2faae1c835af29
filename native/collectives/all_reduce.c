#include "algorithm.h"
#include "direct.h"
#include "hierarchical.h"
#include "recursive_doubling.h"
#include "ring.h"

int mlxdist_all_reduce(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout, int32_t op,
                       mlxdist_call *call) {
  struct reduction reduction;
  struct operation *operation;
  int status = reduction_prepare(&reduction, "all_reduce", group, layout, op);
  if (!status) status = collective_new(group, "all_reduce", MLXDIST_ALL_REDUCE, layout, op, -1, &operation);
  if (status) return status;
  enum mlxdist_algorithm algorithm = algorithm_of(operation);
  if (group->size == 1) {
    operation_round(operation);
    operation_copy(operation, out, in, reduction.bytes);
  } else if (algorithm == MLXDIST_DIRECT) {
    direct_all_reduce(operation, &group->everyone, &reduction, in, out);
  } else if (algorithm == MLXDIST_RECURSIVE_DOUBLING) {
    recursive_doubling_all_reduce(operation, &reduction, in, out);
  } else if (algorithm == MLXDIST_TREE) {
    direct_star(operation, &reduction, in, out);
  } else if (algorithm == MLXDIST_HIERARCHICAL) {
    hierarchical_all_reduce(operation, &reduction, in, out);
  } else {
    char *own = (char *)out + chunk_offset(&reduction.chunks, group->rank);
    if (algorithm == MLXDIST_RING) {
      ring_reduce_scatter(operation, &reduction, in, out, own);
      ring_all_gather(operation, &reduction.chunks, own, out);
    } else {
      direct_reduce_scatter(operation, &group->everyone, &reduction, in, own);
      direct_all_gather(operation, &group->everyone, &reduction.chunks, own, out);
    }
  }
  return operation_start(operation, call);
}
