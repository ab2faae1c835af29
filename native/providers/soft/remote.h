/* The peer's half of a connection through memory, as its sender finds it. */
#pragma once

#include "soft.h"

/* Whether the peer's queue pair is ready for us; if so, what is known of it is valid. */
bool soft_find_peer(struct soft_qp* qp);

/* Removes the segment's name, where it has one, once the peers of all queue pairs have mapped it. New peers cannot find
 * the segment then: queue pairs that are to be connected later must have been created before. */
void soft_remove_name(struct soft_context* context);

/* Whether the peer has posted a receive, as far as is known without taking it. */
static inline bool soft_see_receive(struct soft_qp* qp) {
  struct soft_remote* remote = &qp->remote;
  if (!remote->found && !(remote->found = soft_find_peer(qp))) return false;
  if (remote->next >= remote->posted)
    remote->posted = atomic_load_explicit(&remote->shared->posted, memory_order_acquire);
  return remote->next < remote->posted;
}

/* Takes the peer's next posted receive; false if there is none, or no queue pair that accepts the message. */
static inline bool soft_claim_receive(struct soft_qp* qp, uint64_t* position) {
  struct soft_remote* remote = &qp->remote;
  for (int attempt = 0; attempt < 2; attempt++) {
    if (!soft_see_receive(qp)) return false;
    uint64_t next = remote->next;
    if (atomic_compare_exchange_strong_explicit(&remote->shared->claim, &next, next + 1, memory_order_acq_rel,
                                                memory_order_relaxed)) {
      *position = remote->next++;
      return true;
    }
    remote->found = false; /* the peer's queue pair was reset, and perhaps connected to us again */
  }
  return false;
}
