/* GPU work that macOS has ended, and the operation that kept it waiting. */
#include "abort.h"
#include "error.h"
#include "group.h"
#include "steady_clock.h"

/* MLX reports what happened on the GPU where it next evaluates or synchronizes. */
#define LATE_KEPT_NS 60000000000u

int mlxdist_group_gpu_timeout(mlxdist_group *group) {
  struct engine *engine = group->engine;
  const struct late_peer *late = &engine->late;
  int status = failure_check(&engine->failure);
  if (status) return status;
  engine_lock(engine);
  if (late->seen_ns && clock_ns() - late->seen_ns < LATE_KEPT_NS) {
    status = fail(MLXDIST_TIMEOUT,
                  "macOS ended GPU work of rank %d, which may wait for about 5 s: rank %d was %.1f s "
                  "late for %s. Call mlxdist.meet() on all ranks after what keeps one of them, or set "
                  "MLXDIST_MEET_AFTER to fewer seconds",
                  engine->rank, late->rank, late->seconds, late->operation.text);
    engine_fail(engine, 0, status);
  }
  engine_unlock(engine);
  return status;
}
