/*
 * Debug output: what the engine notices while it works, for people (docs/debugging.md).
 *
 * One line per event, written at once and whole, so that several ranks may share a file:
 *
 *   12:34:56.789012 mlxdist rank 1 pid 4711 warn link: ...
 *
 * Process-wide: the last group that opens it decides. Off, a call of debug() is a load and a branch.
 */
#pragma once

#include <stdatomic.h>

enum debug_level { DEBUG_OFF = 0, DEBUG_WARN = 1, DEBUG_INFO = 2, DEBUG_TRACE = 3 };

/* The highest level that any subsystem writes. */
extern atomic_int debug_level;

#define debug(level, subsystem, ...)                                                                                  \
  do {                                                                                                                \
    if (__builtin_expect(atomic_load_explicit(&debug_level, memory_order_relaxed) >= (level), (level) <= DEBUG_WARN)) \
      debug_write(level, subsystem, __VA_ARGS__);                                                                     \
  } while (0)

void debug_write(enum debug_level level, const char* subsystem, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
