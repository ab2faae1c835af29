/*
 * The clock of engine and transport. Its source is one file, so that a simulation links a clock of its own instead.
 */
#pragma once

#include <stdint.h>

/* Nanoseconds while the machine was awake: a deadline does not pass while the lid is closed, on any system. */
uint64_t clock_ns(void);
