/* See remote.h. */
#include "remote.h"

#include "shared_memory_system.h"

/* Whether the peer's queue pair is ready for us. The claim is read first: soft_claim_receive succeeds only if it
 * still has this value, and then the other members were read while they were valid. */
bool soft_find_peer(struct soft_qp *qp) {
  struct soft_remote *remote = &qp->remote;
  struct shared_queue_pair *shared = remote->shared;
  uint64_t claim = atomic_load_explicit(&shared->claim, memory_order_acquire);
  uint32_t ring_size = atomic_load_explicit(&shared->ring_size, memory_order_relaxed);
  uint64_t cookie = soft_context(qp->verbs.context)->segment->cookie;
  if (claim == 0 || (claim & CLAIM_CLOSED)) return false;
  if (atomic_load_explicit(&shared->qp_num, memory_order_relaxed) != qp->attr.dest_qp_num) return false;
  if (atomic_load_explicit(&shared->peer_cookie, memory_order_relaxed) != cookie) return false;
  if (atomic_load_explicit(&shared->peer_qp_num, memory_order_relaxed) != qp->verbs.qp_num) return false;
  if (atomic_load_explicit(&shared->rq_psn, memory_order_relaxed) != qp->attr.sq_psn) return false;
  if (ring_size == 0 || ring_size > SOFT_MAX_WR || (ring_size & (ring_size - 1))) return false;
  remote->next = claim;
  remote->posted = claim;
  remote->mask = ring_size - 1;
  return true;
}

void soft_remove_name(struct soft_context *context) {
  for (int i = 0; i < SOFT_MAX_QP; i++) {
    const struct soft_qp *qp = context->qps[i];
    if (!qp) continue;
    if (qp->verbs.state != IBV_QPS_RTR && qp->verbs.state != IBV_QPS_RTS) return;
    if (!qp->tcp && !atomic_load_explicit(&qp->shared->attached, memory_order_relaxed)) return;
  }
  segment_remove_name(context->segment);
}
