/* Devices that are the end of one cable, as Thunderbolt's: they reach one peer, and a process opens each once. */
#include "soft.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct soft_context *used_contexts; /* of this process */

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }

/* What the parent uses is no longer known here: a child opens devices of its own. */
static void after_fork_in_child(void) {
  used_contexts = NULL;
  pthread_mutex_unlock(&lock);
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

bool soft_cable_use(struct soft_context *context) {
  if (!context->profile->one_cable) return true;
  bool listed = false, other = false;
  pthread_once(&once, watch_forks);
  pthread_mutex_lock(&lock);
  for (const struct soft_context *used = used_contexts; used; used = used->next_used) {
    listed |= used == context;
    other |= used != context && used->verbs.device == context->verbs.device && used->host == context->host;
  }
  if (!listed && !other) {
    context->next_used = used_contexts;
    used_contexts = context;
  }
  pthread_mutex_unlock(&lock);
  return !other;
}

void soft_cable_close(struct soft_context *context) {
  pthread_mutex_lock(&lock);
  struct soft_context **link = &used_contexts;
  while (*link && *link != context) link = &(*link)->next_used;
  if (*link) *link = context->next_used;
  pthread_mutex_unlock(&lock);
}

int soft_cable_reaches(const struct soft_context *context, const struct ibv_ah_attr *peer) {
  const struct soft_peer_place *end = &context->cable;
  if (!context->profile->one_cable || !end->known) return 0;
  return end->lid == peer->dlid && memcmp(&end->gid, &peer->grh.dgid, sizeof end->gid) == 0 ? 0 : ETIMEDOUT;
}

void soft_cable_join(struct soft_context *context, const struct ibv_ah_attr *peer) {
  context->cable = (struct soft_peer_place){.known = true, .gid = peer->grh.dgid, .lid = peer->dlid};
}
