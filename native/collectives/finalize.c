#include "barrier.h"

/* All ranks have met, so all have what they wanted: a peer that does not confirm the very last message within this
 * time has left already, and its confirmation was lost. */
#define LINGER_NS 2000000000u

/* Waits until every peer has confirmed everything and was told that all of its own has come. */
static void linger(struct engine *engine) {
  struct waiting wait = {0};
  uint64_t begun = clock_ns();
  engine_lock(engine);
  for (int32_t rank = 0; rank < engine->size; rank++)
    for (uint32_t i = 0; engine->peers[rank].usable && i < engine->peers[rank].channel_count; i++)
      engine->peers[rank].channels[i].must_tell = true;
  while (clock_ns() - begun < LINGER_NS && !engine_is_settled(engine) && !failure_check(&engine->failure))
    engine_wait(engine, &wait);
  engine_unlock(engine);
}

/* All ranks meet first: after that nobody can want anything from this one but acknowledgements. */
int mlxdist_group_finalize(mlxdist_group *group) {
  if (group->id != 0)
    return fail(MLXDIST_INVALID_ARGUMENT, "finalize is for the group of all ranks; one made by split ends with destroy");
  int status = barrier_run(group, WIRE_FINALIZE, 0);
  if (!status && group->size > 1) linger(group->engine);
  group->engine->finalized = true;
  return status;
}
