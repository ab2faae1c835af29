/*
 * How an operation waits: it spins, then yields, then sleeps.
 *
 * Spinning gives the latency of a message between two cores. Yielding keeps ranks quick where there are
 * more of them than cores: a spinning rank would hold the core that its peer needs for a whole scheduler
 * slice (4 ms per message were measured). Sleeping keeps a rank that waits for a stopped peer off the CPU.
 */
#ifndef MLXDIST_ENDPOINT_WAIT_H
#define MLXDIST_ENDPOINT_WAIT_H

#include <stdint.h>

/* Not `wait`: macOS has a union of that name. */
struct waiting {
  uint32_t idle;      /* turns without progress */
  uint64_t since_ns;  /* when this idle time began, 0 while there is progress */
  uint32_t sleep_ns;
};

uint64_t clock_ns(void);

/* One turn without progress: spins, yields or sleeps. Returns the nanoseconds since the last progress,
 * or 0 while it is too early to look at the clock. */
uint64_t wait_turn(struct waiting *wait);

/* There was progress: the next idle turn spins again. Returns the nanoseconds waited. */
uint64_t wait_over(struct waiting *wait);

#endif
