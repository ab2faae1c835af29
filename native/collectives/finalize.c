#include "barrier.h"

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
  int status = barrier_run(group, WIRE_FINALIZE, 0);
  group->engine->finalized = group->engine->transport.keepalive_stopped = true;
  return status;
}
