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
static atomic_uint spin_turns = SPIN_TURNS;

void backoff_set_crowded(bool crowded) {
  atomic_store_explicit(&spin_turns, crowded ? CROWDED_SPIN_TURNS : SPIN_TURNS, memory_order_relaxed);
}

bool backoff_spins(const struct backoff *backoff) {
  return backoff->idle + 1 < atomic_load_explicit(&spin_turns, memory_order_relaxed);
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
    thread_yield();
    return now;
  }
  if (backoff->sleep_ns < FIRST_SLEEP_NS) backoff->sleep_ns = FIRST_SLEEP_NS;
  struct timespec nap = {0, backoff->sleep_ns};
  nanosleep(&nap, 0); /* a signal ends it early, which does no harm */
  if (backoff->sleep_ns < LONGEST_SLEEP_NS) backoff->sleep_ns += backoff->sleep_ns / 2;
  return now;
}
