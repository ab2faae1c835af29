#include "barrier.h"

#include "algorithm.h"
#include "recursive_doubling.h"
#include "direct.h"
#include "ring.h"

int barrier_run(mlxdist_group *group, enum wire_operation as, mlxdist_handle **handle) {
  struct operation *operation;
  enum mlxdist_algorithm algorithm = choose(group, MLXDIST_BARRIER, 0);
  struct wire_descriptor descriptor = layout_describe(as, 0, 0, -1, algorithm);
  int status = collective_new(group, "barrier", &descriptor, &operation);
  if (status) return status;
  if (algorithm == MLXDIST_RING) {
    ring_barrier(operation);
  } else if (algorithm == MLXDIST_RECURSIVE_DOUBLING) {
    recursive_doubling_barrier(operation);
  } else {
    direct_barrier(operation);
  }
  return operation_start(operation, handle);
}

int mlxdist_barrier(mlxdist_group *group, mlxdist_handle **handle) { return barrier_run(group, WIRE_BARRIER, handle); }
