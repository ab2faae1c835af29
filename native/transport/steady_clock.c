#define _GNU_SOURCE 1
#include "steady_clock.h"

#include <time.h>

#ifdef __APPLE__
/* CLOCK_MONOTONIC has steps of a microsecond there, and goes on while the Mac sleeps. */
uint64_t clock_ns(void) { return clock_gettime_nsec_np(CLOCK_UPTIME_RAW); }
#else
/* On Linux it stops while the machine is suspended. */
uint64_t clock_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
#endif
