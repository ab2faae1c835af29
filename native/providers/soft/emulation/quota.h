/*
 * Queue pairs of a device that all processes of this user share, as they share a real one.
 *
 * A place is a lock that the system takes back when the process ends, however it ends. Nothing has to be cleaned up.
 */
#pragma once

#include <stdint.h>

struct quota_slot;

/* One of `limit` places at `device` of `host`. NULL with EBUSY in errno if all are taken, or with what went wrong. */
struct quota_slot* quota_take(const char* device, uint32_t host, uint32_t limit);

/* `place` may be NULL. In a child that its process forked this gives back nothing: the place is the parent's. */
void quota_return(struct quota_slot* place);
