/* The first error of an engine, one for all its groups: it wins, every later operation returns it. */
#pragma once

#include "error.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

struct failure {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int unwatched;          /* no thread waits for a failure any more */
  _Atomic int32_t status; /* MLXDIST_OK until the text is complete */
  char text[ERROR_TEXT_BYTES];
};

void failure_init(struct failure* failure);
void failure_destroy(struct failure* failure);

/* Keeps status and text unless there is an error already. Returns 1 if this one is the first. */
int failure_set(struct failure* failure, int32_t status, const char* text);

/* Waits for the first error: returns 1; 0 after failure_unwatch. */
int failure_watch(struct failure* failure);
void failure_unwatch(struct failure* failure);

static inline int failure_is_set(struct failure* failure) {
  return atomic_load_explicit(&failure->status, memory_order_acquire) != 0;
}

/* MLXDIST_OK, or the first error's status with its text in mlxdist_last_error(). */
int failure_check(struct failure* failure);
