/* Posting: where the data moves. */
#define _POSIX_C_SOURCE 200809L
#include "work_queue.h"

#include "bounce.h"
#include "clock.h"
#include "completion.h"
#include "emulation/idle.h"
#include "memory.h"
#include "message.h"
#include "remote.h"
#include "tcp_send.h"
#include "write.h"

#include <errno.h>
#include <signal.h>

static bool is_allowed(const struct soft_profile *profile, enum ibv_wr_opcode opcode) {
  if (__builtin_expect(opcode == IBV_WR_SEND, 1)) return true;
  return opcode == IBV_WR_SEND_WITH_IMM ? profile->immediate : profile->writes && soft_is_write(opcode);
}

static int check_send(const struct soft_qp *qp, const struct ibv_send_wr *wr) {
  const struct soft_profile *profile = soft_context(qp->verbs.context)->profile;
  if (qp->verbs.state != IBV_QPS_RTS && qp->verbs.state != IBV_QPS_ERR) return EINVAL;
  if (!is_allowed(profile, wr->opcode)) return EINVAL;
  if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge) return EINVAL;
  if (wr->send_flags & ~(unsigned)(IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE))
    return EINVAL;
  uint64_t length = soft_message_length(wr);
  if (length > profile->max_message || ((wr->send_flags & IBV_SEND_INLINE) && length > 0)) return EINVAL;
  uint64_t frames = qp->sq_posted_frames - qp->sq_retired_frames;
  if (profile->frames && frames + soft_frames((uint32_t)length) > qp->cap.max_send_wr) return ENOMEM;
  return qp->sq_posted - qp->sq_retired < qp->cap.max_send_wr ? 0 : ENOMEM;
}

/* Copies a message that is to be damaged, and returns what is left of its length. */
static uint32_t copy_damaged(struct soft_context *context, char *to, const struct ibv_send_wr *wr, uint32_t length,
                             unsigned faults) {
  struct soft_faults *generator = &context->faults;
  if (length > 0 && (faults & 1u << SOFT_FAULT_TRUNCATE)) {
    length = (uint32_t)soft_faults_draw(generator, length);
    context->counters.truncated_by_fault++;
  }
  soft_copy_message(to, wr, length);
  if (length > 0 && (faults & 1u << SOFT_FAULT_CORRUPT)) {
    uint64_t bit = soft_faults_draw(generator, 8 * (uint64_t)length);
    ((uint8_t *)to)[bit / 8] ^= (uint8_t)(1 << bit % 8);
    context->counters.corrupted_by_fault++;
  }
  return length;
}

/* Puts the message into the claimed receive, or fails the peer's queue pair, and completes the receive. What
 * the peer wrote is read once and checked, so that it cannot lead us out of its segment. */
static void deliver(struct soft_qp *qp, const struct ibv_send_wr *wr, uint64_t position, unsigned faults) {
  struct soft_context *context = soft_context(qp->verbs.context);
  struct soft_remote *remote = &qp->remote;
  struct shared_queue_pair *shared = remote->shared;
  struct shared_receive receive = shared->receives[position & remote->mask];
  struct shared_completion *completion = &shared->completions[position & remote->mask];
  uint32_t length = (uint32_t)soft_message_length(wr);

  uint32_t status = receive.status;
  if (receive.offset > SEGMENT_BYTES || receive.length > SEGMENT_BYTES - receive.offset) status = IBV_WC_LOC_PROT_ERR;
  if (status == IBV_WC_SUCCESS && !soft_fits(context->profile, length, receive.length)) status = IBV_WC_LOC_LEN_ERR;
  if (status == IBV_WC_SUCCESS) {
    char *to = (char *)remote->segment->layout + receive.offset;
    if (__builtin_expect(faults != 0, 0))
      length = copy_damaged(context, to, wr, length, faults);
    else
      soft_copy_message(to, wr, length);
    context->counters.bytes_sent += length;
  } else {
    atomic_fetch_or(&shared->claim, CLAIM_CLOSED);
    remote->found = false;
  }
  uint32_t flags = wr->opcode == IBV_WR_SEND_WITH_IMM ? IBV_WC_WITH_IMM : 0;
  if (wr->send_flags & SOFT_SEND_IN_PART) flags |= COMPLETED_IN_PART;
  shared_complete(completion, position, status, length, flags, wr->imm_data);
  /* Posted long ago and still in the peer's cache: fetching it now takes that off the next message's way. */
  __builtin_prefetch(&shared->receives[(position + 1) & remote->mask]);
}

/* The peer may reset its queue pair meanwhile: then the receive is another one, and cannot be taken either. */
static bool is_too_long(struct soft_qp *qp, const struct ibv_send_wr *wr) {
  const struct soft_remote *remote = &qp->remote;
  return soft_see_receive(qp) && soft_message_length(wr) > remote->shared->receives[remote->next & remote->mask].length;
}

/* false: it was dropped, as there is no receive or no connection for it. */
static bool transmit(struct soft_qp *qp, const struct ibv_send_wr *wr, unsigned faults, enum ibv_wc_status *status) {
  uint64_t position;
  if (qp->tcp) return soft_tcp_begin(qp, wr, faults);
  if (__builtin_expect(soft_is_write(wr->opcode), 0)) return soft_write(qp, wr, status);
  if (soft_context(qp->verbs.context)->profile->drops_too_long && is_too_long(qp, wr)) return false;
  if (!soft_claim_receive(qp, &position)) return false;
  deliver(qp, wr, position, faults);
  return true;
}

/* The region that the bytes lie in, if the queue pair can use it. */
static struct soft_mr *find_mr(const struct soft_qp *qp, const struct ibv_sge *sge, int access) {
  struct soft_mr *mr = soft_find_mr(qp->verbs.pd, sge->lkey, sge->addr, sge->length, access);
  return mr && mr->number <= qp->last_mr ? mr : NULL;
}

static bool has_good_keys(const struct soft_qp *qp, const struct ibv_send_wr *wr) {
  for (int i = 0; i < wr->num_sge; i++)
    if (wr->sg_list[i].length && !find_mr(qp, &wr->sg_list[i], 0)) return false;
  return true;
}

/* SUCCESS means that the message has left: whether anybody got it is not known on an unreliable connection. */
static enum ibv_wc_status send_message(struct soft_qp *qp, const struct ibv_send_wr *wr) {
  struct soft_context *context = soft_context(qp->verbs.context);
  struct verbs_counters *counters = &context->counters;
  enum ibv_wc_status status = IBV_WC_SUCCESS;
  unsigned faults = 0;
  if (__builtin_expect(context->faults.any, 0)) {
    faults = soft_faults_next(&context->faults);
    if (soft_idle_is_silent(qp)) faults |= 1u << SOFT_FAULT_DROP;
    soft_idle_carried(qp);
  }
  if (faults & 1u << SOFT_FAULT_DIE) raise(SIGKILL);
  if (faults & 1u << SOFT_FAULT_ERROR) {
    counters->failed_by_fault++;
    return IBV_WC_GENERAL_ERR;
  }
  if (faults & 1u << SOFT_FAULT_DROP)
    counters->dropped_by_fault++;
  else if (faults & 1u << SOFT_FAULT_TRUNCATE && context->profile->frames)
    counters->truncated_by_fault++; /* no receive takes a message that lacks frames */
  else if (!transmit(qp, wr, faults, &status))
    counters->dropped++;
  else if ((faults & 1u << SOFT_FAULT_DUPLICATE) && transmit(qp, wr, faults, &status))
    counters->duplicated_by_fault++;
  return status;
}

/* With credit: whether the peer has a receive for the next SEND. It may have reset its queue pair since the last one,
 * so all is looked up again. */
static bool receive_is_posted(struct soft_qp *qp) {
  qp->remote.found = false;
  return soft_see_receive(qp);
}

static bool loses_all(struct soft_qp *qp) {
  const struct soft_faults *faults = &soft_context(qp->verbs.context)->faults;
  return faults->any && (faults->link_down || soft_idle_is_silent(qp));
}

/* For a receive of the peer, or for the system. */
static bool must_wait(struct soft_qp *qp) {
  if (qp->tcp) return soft_tcp_must_wait(qp) && !loses_all(qp);
  return soft_context(qp->verbs.context)->profile->rnr_wait && !loses_all(qp) && !receive_is_posted(qp);
}

/* false: it has to wait. */
static bool send_now(struct soft_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status *status) {
  if (must_wait(qp)) return false;
  *status = qp->tcp && soft_tcp_has_begun(qp) ? IBV_WC_SUCCESS : send_message(qp, wr);
  return *status != IBV_WC_SUCCESS || !qp->tcp || soft_tcp_write(qp, wr);
}

/* Likewise. An empty message has no packet. */
static bool send_packets(struct soft_qp *qp, const struct ibv_send_wr *wr, enum ibv_wc_status *status) {
  const uint32_t length = (uint32_t)soft_message_length(wr);
  for (*status = IBV_WC_SUCCESS; *status == IBV_WC_SUCCESS && qp->sq_crossed < length;) {
    struct ibv_sge piece;
    const struct ibv_send_wr packet = soft_packet(wr, qp->sq_crossed, &piece);
    if (!send_now(qp, &packet, status)) return false;
    qp->sq_crossed += piece.length;
  }
  return true;
}

/* Likewise. */
static bool execute_send(struct soft_qp *qp, const struct ibv_send_wr *wr) {
  enum ibv_wc_status status;
  if (qp->verbs.state == IBV_QPS_ERR)
    status = IBV_WC_WR_FLUSH_ERR;
  else if (!has_good_keys(qp, wr))
    status = IBV_WC_LOC_PROT_ERR;
  else if (!(soft_context(qp->verbs.context)->profile->packets ? send_packets : send_now)(qp, wr, &status))
    return false;
  soft_complete_send(qp, wr, status);
  return true;
}

/* When a SEND that is posted now may leave; 0: at once. */
static uint64_t draw_departure(struct soft_context *context) {
  uint64_t late = soft_faults_late_ns(&context->faults);
  if (!late) return 0;
  context->counters.delayed_by_fault++;
  return soft_clock_ns() + late;
}

static void hold(struct soft_qp *qp, const struct ibv_send_wr *wr, uint64_t leaves_ns) {
  struct soft_send_wr *held = &qp->held[(qp->sq_posted - 1) & qp->sq_mask];
  held->verbs = *wr; /* NOLINT(clang-analyzer-core.NullDereference): soft_create_qp has allocated the ring */
  held->verbs.sg_list = held->list;
  for (int i = 0; i < wr->num_sge; i++) held->list[i] = wr->sg_list[i];
  held->leaves_ns = leaves_ns;
  soft_context(qp->verbs.context)->held++;
}

static void send_held(struct soft_qp *qp) {
  struct soft_send_wr *held;
  while ((held = soft_first_held(qp)) && (!held->leaves_ns || held->leaves_ns <= soft_clock_ns())) {
    if (!execute_send(qp, &held->verbs)) return;
    soft_context(qp->verbs.context)->held--;
  }
}

void soft_send_held(struct soft_context *context) {
  for (int i = 0; i < SOFT_MAX_QP; i++)
    if (context->qps[i]) send_held(context->qps[i]);
}

/* EINVAL: not in RTS or ERR, or the request is invalid. ENOMEM: the queue is full, of requests or of frames; a request
 * leaves it when a completion of it or of a later one is polled. */
int soft_post_send(struct ibv_qp *verbs, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr) {
  struct soft_qp *qp = soft_qp(verbs);
  struct soft_context *context = soft_context(verbs->context);
  if (context->segment->named) soft_remove_name(context);
  if (__builtin_expect(context->held != 0, 0)) send_held(qp);
  for (; wr; wr = wr->next) {
    int error = check_send(qp, wr);
    if (error) {
      *bad_wr = wr;
      return soft_error(error);
    }
    context->counters.sends++;
    uint64_t leaves_ns = 0;
    if (__builtin_expect(context->faults.any, 0) && verbs->state == IBV_QPS_RTS) leaves_ns = draw_departure(context);
    bool queued = soft_first_held(qp);
    qp->sq_posted++;
    if (context->profile->frames) qp->sq_posted_frames += soft_message_frames(wr);
    if (queued || leaves_ns || !execute_send(qp, wr)) hold(qp, wr, leaves_ns);
  }
  return 0;
}

static int check_receive(struct soft_qp *qp, const struct ibv_recv_wr *wr) {
  const struct soft_profile *profile = soft_context(qp->verbs.context)->profile;
  bool early = qp->verbs.state == IBV_QPS_INIT || qp->verbs.state == IBV_QPS_RTR;
  if (qp->verbs.state == IBV_QPS_RESET || (early && !profile->early_receives)) return EINVAL;
  if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_recv_sge) return EINVAL;
  uint32_t length = wr->num_sge ? wr->sg_list->length : 0;
  if (profile->frames && qp->rq_frames + soft_frames(length) > qp->cap.max_recv_wr) return ENOMEM;
  if (qp->rq_posted - qp->rq_head >= qp->cap.max_recv_wr) return ENOMEM;
  if (!length || soft_in_arena(soft_context(qp->verbs.context), wr->sg_list->addr, length)) return 0;
  return soft_bounce_reserve(qp, length);
}

/* A bad key is accepted here and found when a message arrives, as a device finds it. */
static void add_receive(struct soft_qp *qp, const struct ibv_recv_wr *wr) {
  struct ibv_sge sge = wr->num_sge && wr->sg_list->length ? *wr->sg_list : (struct ibv_sge){0};
  struct soft_mr *mr = NULL;
  if (sge.length) mr = find_mr(qp, &sge, IBV_ACCESS_LOCAL_WRITE);
  uint64_t start = (uint64_t)(uintptr_t)soft_context(qp->verbs.context)->segment->layout;
  if (__builtin_expect(qp->bounces != NULL, 0)) sge.addr = soft_bounce_post(qp, &sge);
  qp->shared->receives[qp->rq_posted & qp->rq_mask] = (struct shared_receive){
      .offset = sge.length ? sge.addr - start : 0,
      .length = sge.length,
      .status = mr || !sge.length ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR,
  };
  qp->receives[qp->rq_posted & qp->rq_mask] =
      (struct soft_receive_wr){.wr_id = wr->wr_id, .length = sge.length, .mr = mr};
  if (mr) mr->receives++;
  qp->rq_posted++;
  if (soft_context(qp->verbs.context)->profile->frames) qp->rq_frames += soft_frames(sge.length);
}

/* EINVAL: in RESET, or before RTS where the profile does not allow that, or the buffer is not from alloc_memory of this
 * context: the peer could not write there, and the context has no bounces. ENOMEM: the queue is full, or the arena of
 * bounces; a receive leaves the queue when its completion is polled. */
int soft_post_recv(struct ibv_qp *verbs, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr) {
  struct soft_qp *qp = soft_qp(verbs);
  struct soft_context *context = soft_context(verbs->context);
  int error = 0;
  if (context->segment->named) soft_remove_name(context);
  for (; wr; wr = wr->next) {
    error = check_receive(qp, wr);
    if (error) {
      *bad_wr = wr;
      break;
    }
    context->counters.receives++;
    add_receive(qp, wr);
  }
  atomic_store_explicit(&qp->shared->posted, qp->rq_posted, memory_order_release);
  return soft_error(error);
}
