#include "simulated_clock.h"

#include "../providers/soft/clock.h"
#include "../transport/steady_clock.h"

#include <stdatomic.h>

/* Not 0, which timers take for "not yet". Atomic: an engine's thread reads it until the simulation has stopped that. */
static _Atomic uint64_t now = 1000000000, reading;

uint64_t simulated_clock_now(void) { return atomic_load(&now); }
void simulated_clock_set(uint64_t now_ns) { atomic_store(&now, now_ns); }
void simulated_clock_pass(uint64_t ns) { atomic_fetch_add(&now, ns); }
void simulated_clock_set_reading(uint64_t ns) { atomic_store(&reading, ns); }

uint64_t clock_ns(void) { return atomic_fetch_add(&now, reading); }
uint64_t soft_clock_ns(void) { return clock_ns(); }

/* A peer is never in the middle of a copy: all are in one thread. */
bool soft_wait_for_copy(bool (*done)(const void *copy), const void *copy) { return done(copy); }
