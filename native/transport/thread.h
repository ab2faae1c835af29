/*
 * What threads that poll need of the system, and macOS has under names of its own.
 */
#pragma once

#include <stdint.h>

/* That of this thread for the system, and in tools that list threads. */
uint64_t thread_id(void);

/* Lets another thread have the core, if one of at least the same priority waits for it. */
void thread_yield(void);

/* For a thread of the engine, once: it polls, so its latency is that of a message. Threads of the program, which poll
 * while they wait for an operation, keep their class: it is the program's to choose, it would stay raised for the work
 * that follows, and the default class already runs on performance cores. */
void thread_for_polling(void);

/* A bit for each core that this thread may run on. */
#define THREAD_CORES 1024
struct thread_cores {
  uint64_t words[THREAD_CORES / 64];
};
struct thread_cores thread_cores(void);

/* This thread runs on these alone from now on; macOS has no way to say it. Returns 0 or an errno. */
int thread_keep_on(const struct thread_cores* cores);
