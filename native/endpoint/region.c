#include "region.h"

#include <stdlib.h>

#define WINDOW_BITS 32 /* 4 GiB */

/* From here on the copy into a slot costs more than the message that confirms what was not copied. */
#define WORTHWHILE_BYTES (256u << 10)

static uint64_t window_of(const void *data) { return (uint64_t)(uintptr_t)data >> WINDOW_BITS; }

static mlxdist_region *create(struct engine *engine, void *data, uint64_t bytes) {
  mlxdist_region *region = calloc(1, sizeof *region);
  if (!region) return 0;
  *region = (mlxdist_region){.engine = engine, .data = data, .bytes = bytes};
  region->windows = bytes ? (uint32_t)(window_of((char *)data + bytes - 1) - window_of(data) + 1) : 0;
  if (region->windows) region->registrations = calloc(engine->device_count * region->windows, sizeof(struct ibv_mr *));
  if (!region->registrations) region->windows = 0; /* it is copied then */
  return region;
}

static struct ibv_mr **registration_of(const mlxdist_region *region, const struct device *device, uint64_t window) {
  return &region->registrations[(uint64_t)(device - region->engine->devices) * region->windows + window];
}

static void deregister(mlxdist_region *region, struct device *device, uint32_t window) {
  struct ibv_mr **registration = registration_of(region, device, window);
  if (!*registration) return;
  if (!region->for_once) count(&region->engine->counters.registered_bytes, (uint64_t)-(int64_t)(*registration)->length);
  device_deregister(device, *registration);
  *registration = 0;
}

static void deregister_all(mlxdist_region *region) {
  for (uint32_t i = 0; i < region->engine->device_count; i++)
    for (uint32_t window = 0; window < region->windows; window++)
      deregister(region, &region->engine->devices[i], window);
}

static void destroy(mlxdist_region *region) {
  deregister_all(region);
  free(region->registrations);
  free(region);
}

/* Gives up the registrations of the region that was used least recently. False if all are in use. */
static bool evict(struct engine *engine) {
  mlxdist_region *oldest = 0;
  for (mlxdist_region *region = engine->regions; region; region = region->next)
    if (!region->users && region->used && (!oldest || region->used < oldest->used)) oldest = region;
  if (!oldest) return false;
  deregister_all(oldest);
  oldest->used = 0;
  return true;
}

static mlxdist_region *find(const struct engine *engine, const char *data, uint64_t bytes) {
  mlxdist_region *region = engine->regions;
  while (region &&
         !(data >= region->data && bytes <= region->bytes && (uint64_t)(data - region->data) <= region->bytes - bytes))
    region = region->next;
  return region;
}

void region_enter(struct stream *stream) {
  const struct channel *channel = &stream->lane->peer->channels[WIRE_EAGER]; /* all its cables are alike */
  struct engine *engine = channel->engine;
  if (!channel->device->gathers || stream->bytes < WORTHWHILE_BYTES) return;
  stream->region = find(engine, stream->data, stream->bytes);
  if (!stream->region && channel->device->verbs->registers_freely) {
    stream->region = create(engine, stream->data, stream->bytes);
    if (stream->region) stream->region->for_once = true;
  }
  if (stream->region) stream->region->users++;
}

void region_leave(struct stream *stream) {
  mlxdist_region *region = stream->region;
  stream->region = 0;
  if (region && --region->users == 0 && region->for_once) destroy(region);
}

/* Registers the part of a region that lies in one window. */
static struct ibv_mr *register_window(mlxdist_region *region, struct device *device, uint64_t window) {
  struct engine *engine = region->engine;
  uint64_t first = (window_of(region->data) + window) << WINDOW_BITS, end = first + (1ull << WINDOW_BITS);
  uint64_t begin = (uint64_t)(uintptr_t)region->data, stop = begin + region->bytes;
  if (begin < first) begin = first;
  if (stop > end) stop = end;
  struct ibv_mr *registration;
  do {
    registration = device_register(device, (void *)(uintptr_t)begin, stop - begin);
  } while (!registration && evict(engine));
  if (!registration) return 0;
  count(&engine->counters.memory_registrations, 1);
  if (!region->for_once) count(&engine->counters.registered_bytes, stop - begin);
  return *registration_of(region, device, window) = registration;
}

uint32_t region_lkey(mlxdist_region *region, struct device *device, const void *data, uint32_t bytes) {
  struct engine *engine = region->engine;
  uint64_t window = window_of(data) - window_of(region->data);
  if (!region->windows || window_of((const char *)data + bytes - 1) != window_of(data)) return 0;
  struct ibv_mr *registration = *registration_of(region, device, window);
  if (registration && !region->for_once) count(&engine->counters.registration_hits, 1);
  if (!registration) registration = register_window(region, device, window);
  region->used = ++engine->region_uses;
  return registration ? registration->lkey : 0;
}

void region_free_all(struct engine *engine) {
  while (engine->regions) {
    mlxdist_region *region = engine->regions;
    engine->regions = region->next;
    destroy(region);
  }
}

int mlxdist_register(mlxdist_group *group, void *data, uint64_t bytes, mlxdist_region **result) {
  struct engine *engine = group->engine;
  if (!data || !bytes) return fail(MLXDIST_INVALID_ARGUMENT, "register of %llu bytes", (unsigned long long)bytes);
  mlxdist_region *region = create(engine, data, bytes);
  if (!region) return fail(MLXDIST_RESOURCES, "out of memory for a region");
  engine_lock(engine);
  region->next = engine->regions;
  engine->regions = region;
  engine_unlock(engine);
  *result = region;
  return MLXDIST_OK;
}

void mlxdist_unregister(mlxdist_region *region) {
  struct engine *engine = region->engine;
  struct waiting wait = {0};
  engine_lock(engine);
  while (region->users) engine_wait(engine, &wait);
  mlxdist_region **place = &engine->regions;
  while (*place != region) place = &(*place)->next;
  *place = region->next;
  destroy(region);
  engine_unlock(engine);
}
