#include "algorithm.h"
#include "direct.h"
#include "hierarchical.h"
#include "ring.h"

int mlxdist_reduce_scatter(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout, int32_t op,
                           mlxdist_call *call) {
  struct reduction reduction;
  struct operation *operation;
  int status = reduction_prepare(&reduction, "reduce_scatter", group, layout, op);
  if (!status) status = check_divisible(group, "reduce_scatter", layout);
  if (!status) status = collective_new(group, "reduce_scatter", MLXDIST_REDUCE_SCATTER, layout, op, -1, &operation);
  if (status) return status;
  if (group->size == 1) {
    operation_round(operation);
    operation_copy(operation, out, in, reduction.bytes);
  } else if (algorithm_of(operation) == MLXDIST_RING) {
    ring_reduce_scatter(operation, &reduction, in, 0, out);
  } else if (algorithm_of(operation) == MLXDIST_HIERARCHICAL) {
    hierarchical_reduce_scatter(operation, &reduction, in, out);
  } else {
    direct_reduce_scatter(operation, &group->everyone, &reduction, in, out);
  }
  return operation_start(operation, call);
}
