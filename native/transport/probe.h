/* What a device takes, found by trying: without a peer, and without a message. */
#pragma once

#include "mlxdist.h"
#include "verbs.h"

/* Notes each call of the library before it is made: drivers have calls that never return. */
typedef void probe_call(const char* call, const char* device);

/* Probes an open device whose port is active: at most 200 objects are made, no more than MLXDIST_PROBE_... at one time,
 * and all are given back before it returns. Meanwhile others may find the device without a free queue pair. Port 1. */
void probe_device(const struct verbs* verbs, struct ibv_context* context, probe_call* call, mlxdist_probe* result);
