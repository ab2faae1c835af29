#include "failure.h"

#include "debug.h"
#include "mlxdist.h"

#include <stdio.h>

void failure_init(struct failure *failure) {
  pthread_mutex_init(&failure->lock, 0);
  pthread_cond_init(&failure->changed, 0);
  failure->unwatched = 0;
  atomic_init(&failure->status, MLXDIST_OK);
  failure->text[0] = 0;
}

void failure_destroy(struct failure *failure) {
  pthread_cond_destroy(&failure->changed);
  pthread_mutex_destroy(&failure->lock);
}

int failure_set(struct failure *failure, int32_t status, const char *text) {
  pthread_mutex_lock(&failure->lock);
  int first = atomic_load_explicit(&failure->status, memory_order_relaxed) == MLXDIST_OK;
  if (first) {
    snprintf(failure->text, sizeof failure->text, "%s", text);
    atomic_store_explicit(&failure->status, status, memory_order_release);
    pthread_cond_broadcast(&failure->changed);
  }
  pthread_mutex_unlock(&failure->lock);
  if (first) debug(DEBUG_INFO, "failure", "%s", text);
  return first;
}

int failure_watch(struct failure *failure) {
  pthread_mutex_lock(&failure->lock);
  while (atomic_load_explicit(&failure->status, memory_order_relaxed) == MLXDIST_OK && !failure->unwatched)
    pthread_cond_wait(&failure->changed, &failure->lock);
  pthread_mutex_unlock(&failure->lock);
  return failure_check(failure) != MLXDIST_OK; /* also of a thread that wakes only after failure_unwatch */
}

void failure_unwatch(struct failure *failure) {
  pthread_mutex_lock(&failure->lock);
  failure->unwatched = 1;
  pthread_cond_broadcast(&failure->changed);
  pthread_mutex_unlock(&failure->lock);
}

int failure_check(struct failure *failure) {
  int32_t status = atomic_load_explicit(&failure->status, memory_order_acquire);
  if (status == MLXDIST_OK) return MLXDIST_OK;
  return fail(status, "%s", failure->text);
}
