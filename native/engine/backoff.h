/*
 * Backoff, how an operation waits: it spins, then yields, then sleeps.
 *
 * Spinning gives the latency of a message between two cores. Yielding keeps ranks quick where there are
 * more of them than cores: a spinning rank would hold the core that its peer needs for a whole scheduler
 * slice (4 ms per message were measured). Sleeping keeps a rank that waits for a stopped peer off the CPU.
 */
#pragma once

#include "steady_clock.h"

#include <stdbool.h>

/* Not `wait`: macOS has a union of that name. */
struct backoff {
  uint32_t idle;     /* pauses since the last progress */
  uint64_t since_ns; /* when it had spun enough, 0 before: most waits are shorter, and the clock is not free */
  uint32_t sleep_ns;
};

/* Whether there are more ranks than cores. Then waits hardly spin, and sleep soon: a peer may need the core to send
 * what is waited for. */
void backoff_set_crowded(bool is_so);

/* Whether the next pause only spins: it is too short to let go of a lock. */
bool backoff_spins(const struct backoff* backoff);

/* One pause: spins, yields or sleeps. Returns the time; 0 after spinning, which does not look. */
uint64_t backoff_pause(struct backoff* backoff);

/* There was progress: the next pause spins again. Returns the nanoseconds waited. */
static inline uint64_t backoff_reset(struct backoff* backoff) {
  uint64_t waited = backoff->since_ns ? clock_ns() - backoff->since_ns : 0;
  *backoff = (struct backoff){0};
  return waited;
}
