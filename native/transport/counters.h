/* Counters that one thread at a time writes, and any thread may read meanwhile. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

typedef _Atomic uint64_t counter;

struct transport_counters {
  counter header_bytes_sent, padding_bytes_sent;
  counter messages_sent, messages_received, control_messages_sent;
  counter post_send_calls, post_recv_calls, poll_cq_calls;
  counter receives_posted;
  counter retransmissions, duplicates, damaged, reconnections;
  counter memory_registrations, registration_hits, registered_bytes, slab_bytes;
};

/* One writer at a time, so a plain addition will do: no locked instruction. */
static inline void count(counter* c, uint64_t n) {
  atomic_store_explicit(c, atomic_load_explicit(c, memory_order_relaxed) + n, memory_order_relaxed);
}

static inline uint64_t counted(counter* c) { return atomic_load_explicit(c, memory_order_relaxed); }
