/* See completion.h. */
#include "completion.h"

#include "async.h"
#include "clock.h"
#include "regions.h"
#include "tcp.h"

struct awaited {
  const struct shared_completion *completion;
  uint64_t position;
};

static bool is_completed(const void *copy) {
  const struct awaited *awaited = copy;
  return atomic_load_explicit(&awaited->completion->sequence, memory_order_acquire) == awaited->position + 1;
}

static bool wait_for_completion(const struct soft_qp *qp, uint64_t position) {
  struct awaited awaited = {&qp->shared->completions[position & qp->rq_mask], position};
  return soft_wait_for_copy(is_completed, &awaited);
}

void soft_stop_receiving(struct soft_qp *qp) {
  struct soft_context *context = soft_context(qp->verbs.context);
  if (qp->rq_end != UINT64_MAX || !context->segment->layout) return;
  if (qp->tcp) soft_tcp_stop(qp);
  uint64_t claimed = atomic_exchange(&qp->shared->claim, CLAIM_CLOSED) & ~CLAIM_CLOSED;
  if (claimed > qp->rq_posted) claimed = qp->rq_posted; /* no peer of ours wrote that */
  qp->rq_end = claimed > qp->rq_head ? claimed : qp->rq_head;
  if (qp->rq_end > qp->rq_head && !wait_for_completion(qp, qp->rq_end - 1)) {
    qp->rq_end--;
    context->tainted = true;
  }
  if (!soft_wait_for_writers(qp->shared)) context->tainted = true;
}

/* In the state ERR. */
static void flush_held(struct soft_qp *qp) {
  struct soft_send_wr *held;
  while ((held = soft_first_held(qp))) {
    soft_context(qp->verbs.context)->held--;
    soft_complete_send(qp, &held->verbs, IBV_WC_WR_FLUSH_ERR);
  }
}

void soft_forget_held(struct soft_qp *qp) {
  soft_context(qp->verbs.context)->held -= (uint32_t)(qp->sq_posted - qp->sq_left);
  qp->sq_left = qp->sq_posted;
}

void soft_qp_fail(struct soft_qp *qp) {
  if (qp->verbs.state == IBV_QPS_ERR) return;
  soft_stop_receiving(qp);
  qp->verbs.state = IBV_QPS_ERR;
  flush_held(qp);
}

static uint64_t count_outstanding(const struct soft_cq *cq) {
  uint64_t count = cq->send_count;
  for (unsigned i = 0; i < cq->receiver_count; i++) {
    const struct soft_qp *qp = cq->receivers[i];
    for (uint64_t n = qp->rq_head; n < qp->rq_posted && soft_receive_is_complete(qp, n); n++) count++;
  }
  return count;
}

/* A device has nowhere to put the completion: the queue is lost, and all that rely on it with it. */
static void fail_by_overrun(struct soft_cq *cq) {
  struct soft_context *context = soft_context(cq->verbs.context);
  cq->overrun = true;
  cq->survivors = cq->verbs.cqe;
  if (context->async) soft_async_raise(context, (struct ibv_async_event){{.cq = &cq->verbs}, IBV_EVENT_CQ_ERR});
  for (int i = 0; i < SOFT_MAX_QP; i++) {
    struct soft_qp *qp = context->qps[i];
    if (!qp || (qp->verbs.send_cq != &cq->verbs && qp->verbs.recv_cq != &cq->verbs)) continue;
    soft_qp_fail(qp);
    if (context->async) soft_async_raise(context, (struct ibv_async_event){{.qp = &qp->verbs}, IBV_EVENT_QP_FATAL});
  }
}

void soft_cq_add(struct soft_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status status) {
  struct soft_cq *cq = soft_cq(qp->verbs.send_cq);
  uint32_t size = (uint32_t)cq->verbs.cqe;
  if (soft_cq_may_overrun(cq) && (cq->overrun || count_outstanding(cq) >= size)) {
    if (!cq->overrun) fail_by_overrun(cq);
    return;
  }
  cq->sends[(cq->send_head + cq->send_count++) % size] = (struct soft_send_completion){
      .qp = qp,
      .wr_id = wr->wr_id,
      .position = qp->sq_left,
      .frames = qp->sq_left_frames - qp->sq_stuck_frames,
      .status = status,
      .opcode = __builtin_expect(soft_is_write(wr->opcode), 0) ? IBV_WC_RDMA_WRITE : IBV_WC_SEND,
  };
}

void soft_cq_check_overrun(struct soft_cq *cq) {
  if (!cq->overrun && count_outstanding(cq) > (uint64_t)cq->verbs.cqe) fail_by_overrun(cq);
}
