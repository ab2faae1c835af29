/* Time: the clock, and how long a peer may take. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

uint64_t soft_clock_ns(void);
/* Waits for a peer in the middle of a copy; false if it was not `done` in time. */
bool soft_wait_for_copy(bool (*done)(const void* copy), const void* copy);
