#include "abort.h"
#include "group.h"
#include "keepalive.h"

uint64_t mlxdist_group_signs_of_life(mlxdist_group *group, int32_t rank) {
  struct engine *engine = group->engine;
  if (rank < 0 || rank >= engine->size) return 0;
  engine_lock(engine);
  struct peer *peer = &engine->peers[rank];
  uint64_t signs = peer->signs_of_life;
  int status = peer->endpoint.usable && !engine->ended ? keepalive_probe(&peer->endpoint) : MLXDIST_OK;
  if (status) engine_fail(engine, 0, status);
  engine_unlock(engine);
  return signs;
}
