/*
 * The MR cache: user memory that messages may leave from without being copied into a slot.
 *
 * The user promises that the memory stays until mlxdist_unregister; a registration with the device (a memory region,
 * MR) is made on first use and kept until then, so it never outlives the memory. When the device has no more
 * registrations, the one that was used least recently, and that no operation uses now, goes. A registration never
 * crosses a boundary of 4 GiB, which Apple's provider does not allow.
 *
 * Where registering costs nothing (the soft provider) every large buffer is a region for the time of one operation.
 *
 * Only sends leave from user memory. What arrives lands in a slot, because receives are posted before the operation is
 * known that takes it; a reduction reads it there, so that nothing is copied at all.
 */
#pragma once

#include "device.h"
#include "mlxdist.h"

struct transport;

struct mr_cache {
  struct mlxdist_region* regions;
  uint64_t uses;
};

/* Up to here the copy into a slot costs less than the message that acknowledges what was not copied. */
#define MR_CACHE_MIN_BYTES (256u << 10)

/* A region of the user, until mr_cache_remove. */
mlxdist_region* mr_cache_add(struct transport* transport, void* data, uint64_t bytes);
bool mr_cache_is_used(const mlxdist_region* region);
struct transport* mr_cache_transport(const mlxdist_region* region);
void mr_cache_remove(mlxdist_region* region);

/* The region that memory lies in, in use until mr_cache_release; NULL if it has to be copied. `device`: it leaves by.
 */
mlxdist_region* mr_cache_acquire(struct transport* transport, const struct device* device, const void* data,
                                 uint64_t bytes);
void mr_cache_release(mlxdist_region* region);

/* The key for a piece of a region on a device; 0 if it cannot leave from there. */
uint32_t mr_cache_lkey(mlxdist_region* region, struct device* device, const void* data, uint32_t bytes);

/* When the transport closes. */
void mr_cache_free(struct transport* transport);
