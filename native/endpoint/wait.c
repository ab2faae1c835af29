#include "wait.h"

#include <sched.h>
#include <time.h>

/* 20 polls of an empty completion queue take about half a microsecond, as long as a small message needs. Longer
 * spinning gains nothing, since yielding to nobody costs no more than a few polls; and where a rank has one core,
 * MLX's main thread, which prepares the next operation, needs it. */
#define SPIN_TURNS 20
#define YIELD_NS 20000000u /* 20 ms: a peer that is later than that is computing, not sending */
#define FIRST_SLEEP_NS 50000u
#define LONGEST_SLEEP_NS 1000000u

uint64_t clock_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

uint64_t wait_turn(struct waiting *wait) {
  if (wait->idle == 0) wait->since_ns = clock_ns();
  wait->idle++;
  if (wait->idle < SPIN_TURNS) {
    relax();
    return 0;
  }
  uint64_t waited = clock_ns() - wait->since_ns;
  if (waited < YIELD_NS) {
    sched_yield();
    return waited;
  }
  if (wait->sleep_ns < FIRST_SLEEP_NS) wait->sleep_ns = FIRST_SLEEP_NS;
  struct timespec nap = {0, wait->sleep_ns};
  nanosleep(&nap, 0); /* a signal ends it early, which does no harm */
  if (wait->sleep_ns < LONGEST_SLEEP_NS) wait->sleep_ns += wait->sleep_ns / 2;
  return waited;
}

uint64_t wait_over(struct waiting *wait) {
  if (wait->idle == 0) return 0;
  uint64_t waited = clock_ns() - wait->since_ns;
  *wait = (struct waiting){0};
  return waited;
}
