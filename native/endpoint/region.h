/*
 * A region: user memory that messages may leave from without being copied into a slot.
 *
 * The user promises that the memory stays until mlxdist_unregister; a registration with the device is made on first
 * use and kept until then, so it never outlives the memory. When the device has no more registrations, the one that
 * was used least recently, and that no operation uses now, goes. A registration never crosses a boundary of 4 GiB,
 * which Apple's provider does not allow.
 *
 * Where registering costs nothing (the soft provider) every large buffer is a region for the time of one operation.
 *
 * Only sends leave from user memory. What arrives lands in a slot, because receives are posted before anybody knows
 * what will come; a reduction reads it there, so that nothing is copied at all.
 */
#ifndef MLXDIST_ENDPOINT_REGION_H
#define MLXDIST_ENDPOINT_REGION_H

#include "stream.h"

struct mlxdist_region {
  struct engine* engine;
  char* data;
  uint64_t bytes;
  struct ibv_mr** registrations; /* for each device, one for each 4 GiB that it touches; NULL until used */
  uint32_t windows;
  int users;     /* streams */
  bool for_once; /* gone with its stream */
  uint64_t used; /* when, counted in uses of any region */
  struct mlxdist_region* next;
};

/* With the lock: finds the region that the stream's data lies in, if any; and lets go of it. */
void region_enter(struct stream* stream);
void region_leave(struct stream* stream);

/* The key for a piece of a region on a device; 0 if it cannot leave from there. */
uint32_t region_lkey(mlxdist_region* region, struct device* device, const void* data, uint32_t bytes);

/* With the lock, when the engine closes. */
void region_free_all(struct engine* engine);

#endif
