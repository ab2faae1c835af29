#include "backoff.h"

#include "thread.h"

#include <stdatomic.h>
#include <time.h>

/* 20 polls of an empty completion queue take about half a microsecond, as long as a small message needs. Longer
 * spinning gains nothing, since yielding to no other thread costs no more than a few polls; and where a rank has one
 * core, MLX's main thread, which prepares the next operation, needs it. */
#define SPIN_TURNS 20
#define CROWDED_SPIN_TURNS 2
#define YIELD_NS 20000000u /* 20 ms: a peer that is later than that is computing, not sending */
/* Where ranks share cores a thread that yields may be the next to run all the same: Linux chooses by what each has had.
 * Beside two busy programs on two cores an 8 KiB all_sum of 4 ranks took 1.6 ms; with naps it takes 0.22. */
#define CROWDED_YIELDS 40
#define NAP_NS 1000u /* Linux adds 50 us to it */
#define FIRST_SLEEP_NS 50000u
#define LONGEST_SLEEP_NS 1000000u

static inline void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Of the process, which has one engine. */
static atomic_bool crowded;

static bool is_crowded(void) { return atomic_load_explicit(&crowded, memory_order_relaxed); }
void backoff_set_crowded(bool is_so) { atomic_store_explicit(&crowded, is_so, memory_order_relaxed); }

/* A signal ends it early, which does no harm. */
static void sleep_for(uint32_t ns) {
  struct timespec time = {0, ns};
  nanosleep(&time, 0);
}

bool backoff_spins(const struct backoff *backoff) {
  return backoff->idle + 1 < (uint32_t)(is_crowded() ? CROWDED_SPIN_TURNS : SPIN_TURNS);
}

uint64_t backoff_pause(struct backoff *backoff) {
  bool spins = backoff_spins(backoff);
  backoff->idle++;
  if (spins) {
    relax();
    return 0;
  }
  uint64_t now = clock_ns();
  if (!backoff->since_ns) backoff->since_ns = now;
  if (now - backoff->since_ns < YIELD_NS) {
    if (is_crowded() && backoff->idle > CROWDED_SPIN_TURNS + CROWDED_YIELDS)
      sleep_for(NAP_NS);
    else
      thread_yield();
    return now;
  }
  if (backoff->sleep_ns < FIRST_SLEEP_NS) backoff->sleep_ns = FIRST_SLEEP_NS;
  sleep_for(backoff->sleep_ns);
  if (backoff->sleep_ns < LONGEST_SLEEP_NS) backoff->sleep_ns += backoff->sleep_ns / 2;
  return now;
}
