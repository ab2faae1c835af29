/*
 * Deadlocks: ranks that wait for each other, or for one that has left, will wait for ever.
 *
 * The engine knows which operations make no progress, for which transfer of which rank each of them waits, and which
 * threads wait. mlxdist/runtime/diagnostics/deadlock.py puts together what the ranks know, and fails the group where
 * nothing can come any more.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct operation;

struct deadlock_thread {
  uint64_t thread;                   /* pthread_self(), which Python calls its ident; 0: none yet */
  const struct operation* operation; /* that it waits for; NULL: for none */
  bool timed;                        /* not longer than a time of its own */
  uint64_t id;                       /* as the system counts threads */
};

/* With the lock: this thread waits for the operation, and does so no more. NULL: too many threads wait. */
struct deadlock_thread* deadlock_enter(const struct operation* operation, bool timed);
static inline void deadlock_leave(struct deadlock_thread* thread) {
  if (thread) thread->operation = 0;
}
