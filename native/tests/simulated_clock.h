/* A clock that nothing but the program moves, so a second passes as soon as there is nothing to do. A program that
 * links simulated_clock.c, in place of the clocks of transport and provider, reads no other. */
#pragma once

#include <stdint.h>

uint64_t simulated_clock_now(void);
void simulated_clock_set(uint64_t now_ns);
void simulated_clock_pass(uint64_t ns);

/* From now on every reading takes so long; 0 at first. A loop that waits for a time then ends. */
void simulated_clock_set_reading(uint64_t ns);
