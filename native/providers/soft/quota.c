/* Which places of shared devices this process holds. */
#define _POSIX_C_SOURCE 200809L
#include "quota.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct quota_place {
  char name[QUOTA_NAME_BYTES];
  int fd; /* -1 in a child that was forked */
  struct quota_place *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct quota_place *places;

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }

/* The child must not keep a place when the parent has ended. */
static void after_fork_in_child(void) {
  for (struct quota_place *place = places; place; place = place->next) {
    close(place->fd);
    place->fd = -1;
  }
  pthread_mutex_unlock(&lock);
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

static int lock_any(struct quota_place *place, const char *device, uint32_t host, uint32_t limit) {
  place->fd = -1;
  errno = EBUSY;
  for (uint32_t n = 0; n < limit && place->fd < 0 && errno == EBUSY; n++) {
    snprintf(place->name, sizeof place->name, "mlxdist-%u-%s-%u-%u", (unsigned)getuid(), device, host, n);
    place->fd = quota_lock(place->name);
  }
  return place->fd < 0 ? errno : 0;
}

struct quota_place *quota_take(const char *device, uint32_t host, uint32_t limit) {
  struct quota_place *place = calloc(1, sizeof *place);
  if (!place) return NULL;
  pthread_once(&once, watch_forks);
  pthread_mutex_lock(&lock);
  int error = lock_any(place, device, host, limit);
  if (!error) {
    place->next = places;
    places = place;
  }
  pthread_mutex_unlock(&lock);
  if (!error) return place;
  free(place);
  errno = error;
  return NULL;
}

void quota_return(struct quota_place *place) {
  if (!place) return;
  pthread_mutex_lock(&lock);
  struct quota_place **link = &places;
  while (*link != place) link = &(*link)->next;
  *link = place->next;
  if (place->fd >= 0) quota_unlock(place->name, place->fd);
  pthread_mutex_unlock(&lock);
  free(place);
}
