/*
 * How work requests end, well or with their queue pair. It is one file because one thing leads to the other: a
 * completion may overrun its queue, which fails the queue pairs that use it, which flushes the SENDs that wait there,
 * which adds completions.
 */
#pragma once

#include "message.h"
#include "soft.h"

/* To the state ERR. */
void soft_qp_fail(struct soft_qp* qp);

/* After this no peer writes into the posted receives, or with RDMA_WRITE; those without a message are flushed. */
void soft_stop_receiving(struct soft_qp* qp);

/* The completion of the first SEND that has not left. */
void soft_cq_add(struct soft_qp* qp, const struct ibv_send_wr* wr, enum ibv_wc_status status);

/* Whether completions can outnumber the queue at all; a queue sized for its queue pairs never counts them. */
static inline bool soft_cq_may_overrun(const struct soft_cq* cq) { return cq->demand > (uint64_t)cq->verbs.cqe; }

/* Fails the queue if it has more completions than it has room for. */
void soft_cq_check_overrun(struct soft_cq* cq);

void soft_forget_held(struct soft_qp* qp); /* without completions */

/* Of those that were posted and have not left; NULL if all have. */
static inline struct soft_send_wr* soft_first_held(struct soft_qp* qp) {
  return qp->sq_left == qp->sq_posted ? NULL : &qp->held[qp->sq_left & qp->sq_mask];
}

static inline bool soft_receive_is_complete(const struct soft_qp* qp, uint64_t position) {
  if (position >= qp->rq_end) return true; /* flushed */
  const struct shared_completion* completion = &qp->shared->completions[position & qp->rq_mask];
  return atomic_load_explicit(&completion->sequence, memory_order_acquire) == position + 1;
}

/* The first SEND that has not left leaves, or fails with its queue pair. */
static inline void soft_complete_send(struct soft_qp* qp, const struct ibv_send_wr* wr, enum ibv_wc_status status) {
  qp->sq_left++;
  qp->sq_crossed = 0;
  const struct soft_profile* profile = soft_context(qp->verbs.context)->profile;
  const bool lost = profile->packets && status == IBV_WC_SUCCESS && !soft_message_length(wr);
  if (profile->frames) qp->sq_left_frames += soft_message_frames(wr);
  if (lost)
    qp->sq_stuck_frames++;
  else if (status != IBV_WC_SUCCESS || qp->sq_sig_all || (wr->send_flags & IBV_SEND_SIGNALED))
    soft_cq_add(qp, wr, status);
  else if (profile->signaled_only)
    qp->sq_stuck_frames += soft_message_frames(wr);
  if (status != IBV_WC_SUCCESS) soft_qp_fail(qp);
}
