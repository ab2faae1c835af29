/* See clock.h. */
#define _POSIX_C_SOURCE 200809L
#include "clock.h"

#include <sched.h>
#include <time.h>

/* How long to wait for a peer that is in the middle of a copy. The whole segment takes a tenth of it; a peer that
 * needs longer is stopped or dead. */
#define COPY_NS UINT64_C(1000000000)

uint64_t soft_clock_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

bool soft_wait_for_copy(bool (*done)(const void *copy), const void *copy) {
  uint64_t begun = soft_clock_ns();
  while (!done(copy)) {
    if (soft_clock_ns() - begun > COPY_NS) return false;
    sched_yield();
  }
  return true;
}
