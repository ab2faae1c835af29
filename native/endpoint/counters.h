/* Counters that the thread of an operation writes and any thread may read meanwhile. */
#ifndef MLXDIST_ENDPOINT_COUNTERS_H
#define MLXDIST_ENDPOINT_COUNTERS_H

#include <stdatomic.h>
#include <stdint.h>

typedef _Atomic uint64_t counter;

struct counters {
  counter collectives, point_to_point;
  counter payload_bytes_sent, header_bytes_sent, payload_bytes_received;
  counter messages_sent, messages_received, control_messages_sent;
  counter bytes_copied;
  counter post_send_calls, post_recv_calls, poll_cq_calls;
  counter receives_posted;
  counter memory_registrations, slab_bytes;
  counter wait_ns, operation_ns;
};

/* One writer at a time (the engine's lock), so a plain addition will do: no locked instruction. */
static inline void count(counter *c, uint64_t n) {
  atomic_store_explicit(c, atomic_load_explicit(c, memory_order_relaxed) + n, memory_order_relaxed);
}

static inline uint64_t counted(counter *c) { return atomic_load_explicit(c, memory_order_relaxed); }

#endif
