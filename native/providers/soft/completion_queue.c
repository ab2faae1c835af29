/* Completion queues. */
#include "completion_queue.h"

#include "bounce.h"
#include "completion.h"
#include "emulation/idle.h"
#include "tcp.h"
#include "work_queue.h"

#include <errno.h>
#include <stdlib.h>

struct ibv_cq *soft_create_cq(struct ibv_context *verbs, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                              int comp_vector) {
  struct soft_context *context = soft_context(verbs);
  int error = 0;
  if (cqe < 1 || (uint32_t)cqe > context->profile->max_cqe || comp_vector != 0)
    error = EINVAL;
  else if (channel) /* completions are polled for: waking a process up would cost more than the transfer */
    error = EOPNOTSUPP;
  else if (context->cqs == context->profile->max_cq)
    error = ENOMEM;
  struct soft_cq *cq = error ? NULL : calloc(1, sizeof *cq);
  if (cq) cq->sends = calloc((size_t)cqe, sizeof *cq->sends);
  if (!cq || !cq->sends) {
    free(cq);
    errno = error ? error : ENOMEM;
    return NULL;
  }
  cq->verbs.context = verbs;
  cq->verbs.cq_context = cq_context;
  cq->verbs.cqe = cqe;
  context->cqs++;
  return &cq->verbs;
}

/* EBUSY while queue pairs use it; with the strict order, while there are regions too. */
int soft_destroy_cq(struct ibv_cq *verbs) {
  struct soft_cq *cq = soft_cq(verbs);
  struct soft_context *context = soft_context(verbs->context);
  if (cq->users || (context->profile->strict_order && context->mr_count)) return soft_error(EBUSY);
  context->cqs--;
  free(cq->sends);
  free(cq);
  return 0;
}

void soft_cq_attach(struct soft_qp *qp) {
  struct soft_cq *send_cq = soft_cq(qp->verbs.send_cq);
  struct soft_cq *recv_cq = soft_cq(qp->verbs.recv_cq);
  send_cq->users++;
  send_cq->demand += qp->cap.max_send_wr;
  recv_cq->users++;
  recv_cq->demand += qp->cap.max_recv_wr;
  recv_cq->receivers[recv_cq->receiver_count++] = qp;
}

void soft_cq_detach(struct soft_qp *qp) {
  struct soft_cq *send_cq = soft_cq(qp->verbs.send_cq);
  struct soft_cq *recv_cq = soft_cq(qp->verbs.recv_cq);
  soft_cq_discard(qp);
  send_cq->users--;
  send_cq->demand -= qp->cap.max_send_wr;
  recv_cq->users--;
  recv_cq->demand -= qp->cap.max_recv_wr;
  unsigned i = 0;
  while (recv_cq->receivers[i] != qp) i++;
  recv_cq->receivers[i] = recv_cq->receivers[--recv_cq->receiver_count];
}

void soft_cq_discard(struct soft_qp *qp) {
  struct soft_cq *cq = soft_cq(qp->verbs.send_cq);
  uint32_t size = (uint32_t)cq->verbs.cqe;
  uint32_t kept = 0;
  for (uint32_t i = 0; i < cq->send_count; i++) {
    struct soft_send_completion completion = cq->sends[(cq->send_head + i) % size];
    if (completion.qp != qp) cq->sends[(cq->send_head + kept++) % size] = completion;
  }
  cq->send_count = kept;
}

static int take_sends(struct soft_cq *cq, int num_entries, struct ibv_wc *wc) {
  int count = 0;
  for (; count < num_entries && cq->send_count; count++) {
    const struct soft_send_completion *completion = &cq->sends[cq->send_head];
    completion->qp->sq_retired = completion->position;
    completion->qp->sq_retired_frames = completion->frames;
    wc[count] = (struct ibv_wc){
        .wr_id = completion->wr_id,
        .status = completion->status,
        .opcode = completion->opcode,
        .qp_num = completion->qp->verbs.qp_num,
    };
    cq->send_count--;
    if (++cq->send_head == (uint32_t)cq->verbs.cqe) cq->send_head = 0;
  }
  return count;
}

static bool take_receive(struct soft_qp *qp, struct ibv_wc *wc) {
  uint64_t position = qp->rq_head;
  if (position == qp->rq_posted || !soft_receive_is_complete(qp, position)) return false;
  const struct soft_receive_wr *receive = &qp->receives[position & qp->rq_mask];
  bool in_part = false;
  *wc = (struct ibv_wc){
      .wr_id = receive->wr_id,
      .status = IBV_WC_WR_FLUSH_ERR,
      .opcode = IBV_WC_RECV,
      .qp_num = qp->verbs.qp_num,
      .src_qp = qp->attr.dest_qp_num,
  };
  if (position < qp->rq_end) {
    const struct shared_completion *completion = &qp->shared->completions[position & qp->rq_mask];
    wc->status = (enum ibv_wc_status)completion->status;
    wc->byte_len = completion->byte_len;
    wc->imm_data = completion->imm_data;
    wc->wc_flags = completion->wc_flags;
    if (__builtin_expect(wc->wc_flags & COMPLETED_BY_WRITE, 0)) {
      wc->wc_flags &= ~COMPLETED_BY_WRITE;
      wc->opcode = IBV_WC_RECV_RDMA_WITH_IMM;
    } else if (wc->wc_flags & COMPLETED_IN_PART) {
      wc->wc_flags &= ~COMPLETED_IN_PART;
      in_part = true;
    } else if (wc->status == IBV_WC_SUCCESS && wc->byte_len > receive->length)
      wc->status = IBV_WC_LOC_LEN_ERR;
  }
  if (__builtin_expect(qp->bounces != NULL, 0)) soft_bounce_take(qp, wc);
  if (soft_context(qp->verbs.context)->profile->no_length) wc->byte_len = 0;
  if (receive->mr) receive->mr->receives--;
  qp->rq_head++;
  if (soft_context(qp->verbs.context)->profile->frames) qp->rq_frames -= soft_frames(receive->length);
  if (wc->status != IBV_WC_SUCCESS) soft_qp_fail(qp);
  if (in_part && wc->status == IBV_WC_SUCCESS) wc->status = IBV_WC_LOC_LEN_ERR;
  if (__builtin_expect(soft_context(qp->verbs.context)->faults.idle_ms, 0)) soft_idle_carried(qp);
  return true;
}

/* With the fault of that name. Errors are never lost: a queue pair that fails says so. */
static int lose_completions(struct soft_context *context, struct ibv_wc *wc, int count) {
  int kept = 0;
  for (int i = 0; i < count; i++) {
    if (wc[i].status == IBV_WC_SUCCESS && soft_faults_lose_completion(&context->faults))
      context->counters.completions_lost_by_fault++;
    else
      wc[kept++] = wc[i];
  }
  return kept;
}

/* -EOVERFLOW after an overrun, once the completions from before it have been taken. */
int soft_poll_cq(struct ibv_cq *verbs, int num_entries, struct ibv_wc *wc) {
  struct soft_cq *cq = soft_cq(verbs);
  struct soft_context *context = soft_context(verbs->context);
  context->counters.polls++;
  if (__builtin_expect(context->tcp_users != 0, 0)) soft_tcp_progress(context);
  if (context->held) soft_send_held(context);
  if (num_entries < 0) return -EINVAL;
  if (soft_cq_may_overrun(cq)) soft_cq_check_overrun(cq);
  int limit = cq->overrun && cq->survivors < num_entries ? cq->survivors : num_entries;

  int count = take_sends(cq, limit, wc);
  unsigned next = cq->next_receiver;
  for (unsigned i = 0; i < cq->receiver_count && count < limit; i++, next++) {
    if (next >= cq->receiver_count) next = 0;
    while (count < limit && take_receive(cq->receivers[next], &wc[count])) count++;
  }
  /* Begin behind the last one served, so that a busy queue pair does not starve the others. */
  cq->next_receiver = next >= cq->receiver_count ? 0 : next;

  int taken = count;
  if (__builtin_expect(context->faults.any, 0)) count = lose_completions(context, wc, count);
  if (!cq->overrun) return count;
  cq->survivors -= taken;
  return taken || num_entries == 0 ? count : -EOVERFLOW;
}
