#include "mr_cache.h"

#include "transport.h"

#include <stdlib.h>

#define WINDOW_BITS 32 /* 4 GiB */

struct mlxdist_region {
  struct transport *transport;
  char *data;
  uint64_t bytes;
  struct ibv_mr **registrations; /* for each device, one for each 4 GiB that it touches; NULL until used */
  uint32_t windows;
  int users;     /* transfers */
  bool for_once; /* gone with its transfer */
  uint64_t used; /* when, counted in uses of any region */
  struct mlxdist_region *next;
};

static uint64_t window_of(const void *data) { return (uint64_t)(uintptr_t)data >> WINDOW_BITS; }

static mlxdist_region *create(struct transport *transport, void *data, uint64_t bytes) {
  mlxdist_region *region = calloc(1, sizeof *region);
  if (!region) return 0;
  *region = (mlxdist_region){.transport = transport, .data = data, .bytes = bytes};
  region->windows = bytes ? (uint32_t)(window_of((char *)data + bytes - 1) - window_of(data) + 1) : 0;
  if (region->windows)
    region->registrations = calloc((size_t)transport->device_count * region->windows, sizeof(struct ibv_mr *));
  if (!region->registrations) region->windows = 0; /* it is copied then */
  return region;
}

static struct ibv_mr **registration_of(const mlxdist_region *region, const struct device *device, uint64_t window) {
  return &region->registrations[(uint64_t)(device - region->transport->devices) * region->windows + window];
}

static void deregister(mlxdist_region *region, struct device *device, uint32_t window) {
  struct ibv_mr **registration = registration_of(region, device, window);
  if (!*registration) return;
  if (!region->for_once)
    count(&region->transport->counters->registered_bytes, (uint64_t)-(int64_t)(*registration)->length);
  device_deregister(device, *registration);
  *registration = 0;
}

static void deregister_all(mlxdist_region *region) {
  for (uint32_t i = 0; i < region->transport->device_count; i++)
    for (uint32_t window = 0; window < region->windows; window++)
      deregister(region, &region->transport->devices[i], window);
}

static void destroy(mlxdist_region *region) {
  deregister_all(region);
  free(region->registrations);
  free(region);
}

/* Gives up the registrations of the region that was used least recently. False if all are in use. */
static bool evict(struct transport *transport) {
  mlxdist_region *oldest = 0;
  for (mlxdist_region *region = transport->mr_cache.regions; region; region = region->next)
    if (!region->users && region->used && (!oldest || region->used < oldest->used)) oldest = region;
  if (!oldest) return false;
  deregister_all(oldest);
  oldest->used = 0;
  return true;
}

static mlxdist_region *find(const struct transport *transport, const char *data, uint64_t bytes) {
  mlxdist_region *region = transport->mr_cache.regions;
  while (region &&
         !(data >= region->data && bytes <= region->bytes && (uint64_t)(data - region->data) <= region->bytes - bytes))
    region = region->next;
  return region;
}

mlxdist_region *mr_cache_acquire(struct transport *transport, const struct device *device, const void *data,
                                 uint64_t bytes) {
  if (!device->gathers || bytes < MR_CACHE_MIN_BYTES) return 0;
  mlxdist_region *region = find(transport, data, bytes);
  if (!region && device->verbs->registers_freely) {
    region = create(transport, (void *)data, bytes);
    if (region) region->for_once = true;
  }
  if (region) region->users++;
  return region;
}

void mr_cache_release(mlxdist_region *region) {
  if (region && --region->users == 0 && region->for_once) destroy(region);
}

/* Registers the part of a region that lies in one window. */
static struct ibv_mr *register_window(mlxdist_region *region, struct device *device, uint64_t window) {
  struct transport *transport = region->transport;
  uint64_t first = (window_of(region->data) + window) << WINDOW_BITS, end = first + (1ull << WINDOW_BITS);
  uint64_t begin = (uint64_t)(uintptr_t)region->data, stop = begin + region->bytes;
  if (begin < first) begin = first;
  if (stop > end) stop = end;
  struct ibv_mr *registration;
  do {
    registration = device_register(device, (void *)(uintptr_t)begin, stop - begin);
  } while (!registration && evict(transport));
  if (!registration) return 0;
  count(&transport->counters->memory_registrations, 1);
  if (!region->for_once) count(&transport->counters->registered_bytes, stop - begin);
  return *registration_of(region, device, window) = registration;
}

uint32_t mr_cache_lkey(mlxdist_region *region, struct device *device, const void *data, uint32_t bytes) {
  struct transport *transport = region->transport;
  uint64_t window = window_of(data) - window_of(region->data);
  if (!region->windows || window_of((const char *)data + bytes - 1) != window_of(data)) return 0;
  struct ibv_mr *registration = *registration_of(region, device, window);
  if (registration && !region->for_once) count(&transport->counters->registration_hits, 1);
  if (!registration) registration = register_window(region, device, window);
  region->used = ++transport->mr_cache.uses;
  return registration ? registration->lkey : 0;
}

void mr_cache_free(struct transport *transport) {
  while (transport->mr_cache.regions) mr_cache_remove(transport->mr_cache.regions);
}

mlxdist_region *mr_cache_add(struct transport *transport, void *data, uint64_t bytes) {
  mlxdist_region *region = create(transport, data, bytes);
  if (!region) return 0;
  region->next = transport->mr_cache.regions;
  return transport->mr_cache.regions = region;
}

bool mr_cache_is_used(const mlxdist_region *region) { return region->users; }

struct transport *mr_cache_transport(const mlxdist_region *region) { return region->transport; }

void mr_cache_remove(mlxdist_region *region) {
  mlxdist_region **place = &region->transport->mr_cache.regions;
  while (*place != region) place = &(*place)->next;
  *place = region->next;
  destroy(region);
}
