/* Devices that are the end of one cable, as Thunderbolt's: they reach one peer, and a process opens each once. */
#include "single_peer.h"

#include "../fork_lock.h"

#include <errno.h>
#include <string.h>

static struct soft_context *used_contexts; /* of this process */

/* What the parent uses is no longer known here: a child opens devices of its own. */
static void forget_parent(void) { used_contexts = NULL; }

FORK_LOCK(forget_parent)

bool soft_single_peer_claim(struct soft_context *context) {
  if (!context->profile->single_peer) return true;
  bool listed = false, other = false;
  lock_list();
  for (const struct soft_context *used = used_contexts; used; used = used->next_used) {
    listed |= used == context;
    other |= used != context && used->verbs.device == context->verbs.device && used->host == context->host;
  }
  if (!listed && !other) {
    context->next_used = used_contexts;
    used_contexts = context;
  }
  unlock_list();
  return !other;
}

void soft_single_peer_release(struct soft_context *context) {
  lock_list();
  struct soft_context **link = &used_contexts;
  while (*link && *link != context) link = &(*link)->next_used;
  if (*link) *link = context->next_used;
  unlock_list();
}

int soft_single_peer_check(const struct soft_context *context, const struct ibv_ah_attr *peer) {
  const struct soft_peer_address *end = &context->single_peer;
  if (!context->profile->single_peer || !end->known) return 0;
  return end->lid == peer->dlid && memcmp(&end->gid, &peer->grh.dgid, sizeof end->gid) == 0 ? 0 : ETIMEDOUT;
}

void soft_single_peer_connect(struct soft_context *context, const struct ibv_ah_attr *peer) {
  context->single_peer = (struct soft_peer_address){.known = true, .gid = peer->grh.dgid, .lid = peer->dlid};
}
