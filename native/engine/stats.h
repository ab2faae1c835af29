/*
 * Counters of operations, by kind: what it is, and which reduction it has. operation_end adds to them, with the
 * engine's lock; any thread reads them meanwhile.
 */
#pragma once

#include "counters.h"
#include "wire.h"

/* Of an operation: its reductions, or for messages STATS_SENDS, STATS_RECEIVES or both. */
#define STATS_VARIANTS 4
#define STATS_KINDS (STATS_VARIANTS * (WIRE_SPLIT + 1))
enum stats_message { STATS_SENDS = 1, STATS_RECEIVES = 2 };

/* Operations of one kind that have ended well. */
struct operation_counters {
  counter calls;
  counter payload_bytes_sent, payload_bytes_received;
  counter ns;
};

/* With the lock: one more has ended, after `ns`. `sent` and `received` are the bytes of all its transfers. */
static inline void stats_count(struct operation_counters* counters, uint64_t sent, uint64_t received, uint64_t ns) {
  count(&counters->calls, 1);
  count(&counters->payload_bytes_sent, sent);
  count(&counters->payload_bytes_received, received);
  count(&counters->ns, ns);
}
