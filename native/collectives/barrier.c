#include "mesh.h"

/* One message time, whatever the number of ranks. */
int mlxdist_barrier(mlxdist_group *group) {
  uint64_t started;
  int status = operation_begin(group, "barrier", 0, &started);
  if (status) return status;
  return operation_end(group, mesh_meet(group, WIRE_BARRIER), started, &group->engine.counters.collectives);
}
