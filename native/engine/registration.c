/* Memory that the user registers: messages leave from it without a copy (mr_cache.h). */
#include "error.h"
#include "group.h"
#include "progress.h"

int mlxdist_register(mlxdist_group *group, void *data, uint64_t bytes, mlxdist_region **result) {
  struct engine *engine = group->engine;
  if (!data || !bytes) return fail(MLXDIST_INVALID_ARGUMENT, "register of %llu bytes", (unsigned long long)bytes);
  engine_lock(engine);
  *result = mr_cache_add(&engine->transport, data, bytes);
  engine_unlock(engine);
  return *result ? MLXDIST_OK : fail(MLXDIST_RESOURCES, "out of memory for a region");
}

void mlxdist_unregister(mlxdist_region *region) {
  struct engine *engine = peer_of(mr_cache_transport(region)->endpoints[0])->engine;
  struct backoff backoff = {0};
  engine_lock(engine);
  while (mr_cache_is_used(region)) engine_wait(engine, &backoff);
  mr_cache_remove(region);
  engine_unlock(engine);
}
