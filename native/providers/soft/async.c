/*
 * Asynchronous events: what happens to a queue, a queue pair or a port outside any work request. The thread that takes
 * them is not the one that uses the context, so they have a lock of their own. The pipe holds one byte for each event
 * that was raised; an event that was forgotten leaves its byte, which wakes a reader for nothing.
 */
#define _POSIX_C_SOURCE 200809L
#include "async.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

struct soft_event {
  struct ibv_async_event verbs;
  bool taken; /* and not acknowledged */
  struct soft_event *next;
};

struct soft_async {
  int fds[2];
  pthread_mutex_t lock;
  pthread_cond_t acknowledged;
  struct soft_event *events; /* in the order in which they were raised */
};

/* The queue or queue pair that the event is about; NULL: a port, of which there is one. */
static const void *element_of(const struct ibv_async_event *event) {
  bool of_port = event->event_type == IBV_EVENT_PORT_ACTIVE || event->event_type == IBV_EVENT_PORT_ERR;
  return of_port ? NULL : event->element.cq;
}

int soft_async_start(struct soft_context *context) {
  struct soft_async *async = calloc(1, sizeof *async);
  if (!async) return ENOMEM;
  if (pipe(async->fds)) {
    int error = errno;
    free(async);
    return error;
  }
  for (int i = 0; i < 2; i++) fcntl(async->fds[i], F_SETFD, FD_CLOEXEC);
  fcntl(async->fds[1], F_SETFL, O_NONBLOCK); /* the thread that raises an event never waits for its reader */
  pthread_mutex_init(&async->lock, NULL);
  pthread_cond_init(&async->acknowledged, NULL);
  context->async = async;
  context->verbs.async_fd = async->fds[0];
  return 0;
}

static void remove_event(struct soft_event **link) {
  struct soft_event *event = *link;
  *link = event->next;
  free(event);
}

void soft_async_stop(struct soft_context *context) {
  struct soft_async *async = context->async;
  if (!async) return;
  while (async->events) remove_event(&async->events);
  for (int i = 0; i < 2; i++) close(async->fds[i]);
  pthread_cond_destroy(&async->acknowledged);
  pthread_mutex_destroy(&async->lock);
  free(async);
  context->async = NULL;
}

void soft_async_raise(struct soft_context *context, struct ibv_async_event event) {
  struct soft_async *async = context->async;
  struct soft_event *raised = calloc(1, sizeof *raised);
  if (!raised) return;
  raised->verbs = event;
  pthread_mutex_lock(&async->lock);
  struct soft_event **link = &async->events;
  while (*link) link = &(*link)->next;
  *link = raised;
  /* A pipe that is full of thousands of events has no reader who would miss this one. */
  if (write(async->fds[1], "", 1) != 1) remove_event(link);
  pthread_mutex_unlock(&async->lock);
}

/* An event of a port needs no acknowledgement: a port is not destroyed. */
static bool take(struct soft_async *async, struct ibv_async_event *event) {
  bool found = false;
  pthread_mutex_lock(&async->lock);
  struct soft_event **link = &async->events;
  while (*link && (*link)->taken) link = &(*link)->next;
  if (*link) {
    (*link)->taken = true;
    *event = (*link)->verbs;
    found = true;
    if (!element_of(event)) remove_event(link);
  }
  pthread_mutex_unlock(&async->lock);
  return found;
}

int soft_async_get(struct soft_context *context, struct ibv_async_event *event) {
  char byte;
  do {
    if (read(context->async->fds[0], &byte, 1) != 1) return -1;
  } while (!take(context->async, event));
  return 0;
}

void soft_async_acknowledge(struct soft_context *context, const struct ibv_async_event *event) {
  struct soft_async *async = context->async;
  pthread_mutex_lock(&async->lock);
  for (struct soft_event **link = &async->events; *link; link = &(*link)->next) {
    const struct ibv_async_event *verbs = &(*link)->verbs;
    bool same = verbs->event_type == event->event_type && element_of(verbs) == element_of(event);
    if (!(*link)->taken || !same) continue;
    remove_event(link);
    break;
  }
  pthread_cond_broadcast(&async->acknowledged);
  pthread_mutex_unlock(&async->lock);
}

/* Discards those that are not taken; false if one waits to be acknowledged. */
static bool forget(struct soft_async *async, const void *element) {
  bool all = true;
  for (struct soft_event **link = &async->events; *link;) {
    bool about = element_of(&(*link)->verbs) == element;
    if (about && !(*link)->taken) {
      remove_event(link);
      continue;
    }
    all &= !about;
    link = &(*link)->next;
  }
  return all;
}

void soft_async_settle(struct soft_context *context, const void *element) {
  struct soft_async *async = context->async;
  pthread_mutex_lock(&async->lock);
  while (!forget(async, element)) pthread_cond_wait(&async->acknowledged, &async->lock);
  pthread_mutex_unlock(&async->lock);
}
