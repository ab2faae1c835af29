/* How all ranks meet: the barrier, and the end of the world. */
#include "algorithm.h"
#include "direct.h"
#include "recursive_doubling.h"
#include "ring.h"

/* Returns once every rank has called it as the same operation. */
static int run(mlxdist_group *group, int32_t as, mlxdist_call *call) {
  struct operation *operation;
  int status = collective_new(group, "barrier", as, 0, 0, -1, &operation);
  if (status) return status;
  if (algorithm_of(operation) == MLXDIST_RING) {
    ring_barrier(operation);
  } else if (algorithm_of(operation) == MLXDIST_RECURSIVE_DOUBLING) {
    recursive_doubling_barrier(operation);
  } else {
    direct_barrier(operation);
  }
  return operation_start(operation, call);
}

int mlxdist_barrier(mlxdist_group *group, mlxdist_call *call) { return run(group, MLXDIST_BARRIER, call); }

/* All ranks meet: after that this one wants nothing from any other. Another may not know it yet, since the last
 * messages to it were lost: the progress thread goes on sending them, and re-creating queue pairs, until destroy.
 *
 * Rejected: to wait here until all is confirmed. The last confirmation of all can always be lost, so some rank would
 * have to give up waiting for it, and leave one behind that needs it; only the side channel can say that all are done.
 */
int mlxdist_group_finalize(mlxdist_group *group) {
  if (group->id != 0)
    return fail(MLXDIST_INVALID_ARGUMENT,
                "finalize is for the group of all ranks; one made by split ends with destroy");
  int status = run(group, WIRE_FINALIZE, 0);
  engine_finalize(group->engine);
  return status;
}
