#include "mesh.h"

/* All ranks meet first: after that nobody can want anything from this one but acknowledgements. */
int mlxdist_group_finalize(mlxdist_group *group) {
  uint64_t started;
  int status = operation_begin(group, "finalize", 0, &started);
  if (status) return status;
  status = mesh_meet(group, WIRE_FINALIZE);
  if (!status) status = engine_drain(&group->engine);
  group->finalized = true;
  return operation_end(group, status, started, &group->engine.counters.collectives);
}
