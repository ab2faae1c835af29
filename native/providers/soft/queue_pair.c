/* Queue pairs: their life and their states. */
#define _POSIX_C_SOURCE 200809L
#include "queue_pair.h"

#include "bounce.h"
#include "completion.h"
#include "completion_queue.h"
#include "emulation/quota.h"
#include "emulation/single_peer.h"
#include "remote.h"
#include "tcp.h"

#include <errno.h>
#include <stdlib.h>

#define PSN_MASK 0xffffff
#define QPN_MASK 0xffffff

static uint32_t power_of_two(uint32_t at_least) {
  uint32_t size = 1;
  while (size < at_least) size *= 2;
  return size;
}

/* How deep a queue becomes. */
static uint32_t queue_depth(const struct soft_profile *profile, uint32_t asked) {
  if (!profile->min_wr) return asked;
  uint32_t most = asked > profile->min_wr ? asked : profile->min_wr;
  return power_of_two(most + 1) - 1;
}

static int check_init_attr(const struct ibv_pd *pd, const struct ibv_qp_init_attr *attr) {
  const struct ibv_qp_cap *cap = &attr->cap;
  const struct soft_profile *profile = soft_context(pd->context)->profile;
  if (attr->qp_type != IBV_QPT_UC) return EOPNOTSUPP;
  if (!attr->send_cq || !attr->recv_cq || attr->srq) return EINVAL;
  if (attr->send_cq->context != pd->context || attr->recv_cq->context != pd->context) return EINVAL;
  if (cap->max_send_wr > profile->max_wr || cap->max_recv_wr > profile->max_wr) return EINVAL;
  if (cap->max_send_sge > profile->max_send_sge || cap->max_recv_sge > SOFT_MAX_RECV_SGE) return EINVAL;
  return cap->max_inline_data ? EINVAL : 0;
}

/* Positions go on where the last connection, or the last queue pair in this place, stopped: what is left of it
 * in the shared rings, and a peer that still sends to it does not fit. */
static void start_receiving(struct soft_qp *qp) {
  uint64_t *position = &soft_context(qp->verbs.context)->positions[qp->verbs.handle];
  *position = (qp->rq_posted > *position ? qp->rq_posted : *position) + 1;
  qp->rq_posted = qp->rq_head = *position;
  qp->rq_frames = 0;
  qp->rq_end = UINT64_MAX;
  atomic_store(&qp->shared->posted, qp->rq_posted);
}

static void free_qp(struct soft_qp *qp) {
  if (!qp) return;
  quota_return(qp->quota_slot);
  free(qp->bounces);
  free(qp->receives);
  free(qp->held);
  free(qp);
}

static struct soft_qp *allocate_qp(uint32_t sends, uint32_t receives) {
  struct soft_qp *qp = calloc(1, sizeof *qp);
  if (qp) qp->receives = calloc(receives, sizeof *qp->receives);
  if (qp) qp->held = calloc(sends, sizeof *qp->held);
  if (qp && qp->receives && qp->held) return qp;
  free_qp(qp);
  return NULL;
}

/* Takes a place at the device, where processes share it. */
static struct soft_qp *take_quota_slot(const struct soft_context *context, struct soft_qp *qp) {
  if (!qp || !context->profile->shares_qp) return qp;
  qp->quota_slot = quota_take(context->verbs.device->name, context->host, context->profile->max_qp);
  if (qp->quota_slot) return qp;
  int error = errno;
  free_qp(qp);
  errno = error;
  return NULL;
}

/* EOPNOTSUPP for any type but UC, EINVAL for capabilities above those of the device, ENOMEM for more queue
 * pairs than it has, EBUSY if other processes have some of them, EIO if the context is tainted. */
struct ibv_qp *soft_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
  struct soft_context *context = soft_context(pd->context);
  int error = check_init_attr(pd, attr);
  uint32_t place = 0;
  while (place < context->profile->max_qp && context->qps[place]) place++;
  if (!error && place == context->profile->max_qp) error = context->profile->shares_qp ? EBUSY : ENOMEM;
  if (!error && context->tainted) error = EIO;
  if (!error) {
    attr->cap.max_send_wr = queue_depth(context->profile, attr->cap.max_send_wr);
    attr->cap.max_recv_wr = queue_depth(context->profile, attr->cap.max_recv_wr);
  }
  uint32_t ring_size = error ? 0 : power_of_two(attr->cap.max_recv_wr);
  uint32_t held_size = error ? 0 : power_of_two(attr->cap.max_send_wr);
  errno = error;
  struct soft_qp *qp = error ? NULL : take_quota_slot(context, allocate_qp(held_size, ring_size));
  if (!qp) return NULL;

  qp->verbs = (struct ibv_qp){
      .context = pd->context,
      .qp_context = attr->qp_context,
      .pd = pd,
      .send_cq = attr->send_cq,
      .recv_cq = attr->recv_cq,
      .handle = place,
      .qp_num = (++context->qps_created * SOFT_MAX_QP + place) & QPN_MASK,
      .state = IBV_QPS_RESET,
      .qp_type = attr->qp_type,
  };
  qp->cap = attr->cap;
  qp->sq_sig_all = attr->sq_sig_all;
  qp->last_mr = context->profile->late_regions ? UINT32_MAX : 0;
  qp->rq_mask = ring_size - 1;
  qp->sq_mask = held_size - 1;
  qp->shared = &context->segment->layout->queue_pairs[place];
  atomic_store(&qp->shared->claim, CLAIM_CLOSED);
  start_receiving(qp);
  atomic_store(&qp->shared->ring_size, ring_size);
  atomic_store(&qp->shared->attached, 0);
  atomic_store(&qp->shared->pd, soft_pd(pd)->number);
  atomic_store(&qp->shared->access, 0);
  atomic_store(&qp->shared->qp_num, qp->verbs.qp_num);

  soft_cq_attach(qp);
  soft_pd(pd)->users++;
  context->qps[place] = qp;
  return &qp->verbs;
}

static void leave_peer(struct soft_qp *qp) {
  if (qp->remote.segment) segment_release(qp->remote.segment);
  qp->remote = (struct soft_remote){0};
  soft_tcp_forget(qp);
}

static void forget_receives(struct soft_qp *qp) {
  for (; qp->rq_head < qp->rq_posted; qp->rq_head++) {
    struct soft_mr *mr = qp->receives[qp->rq_head & qp->rq_mask].mr;
    if (mr) mr->receives--;
    if (qp->bounces) soft_bounce_drop(qp, qp->rq_head);
  }
}

static void reset(struct soft_qp *qp) {
  soft_stop_receiving(qp);
  forget_receives(qp);
  soft_forget_held(qp);
  leave_peer(qp);
  soft_cq_discard(qp);
  qp->sq_posted = qp->sq_left = qp->sq_retired = 0;
  qp->sq_crossed = 0;
  qp->sq_posted_frames = qp->sq_left_frames = qp->sq_retired_frames = qp->sq_stuck_frames = 0;
  start_receiving(qp);
  atomic_store(&qp->shared->attached, 0);
  qp->attr = (struct ibv_qp_attr){0};
  qp->carried_ns = 0;
  qp->silent = false;
}

int soft_destroy_qp(struct ibv_qp *verbs) {
  struct soft_qp *qp = soft_qp(verbs);
  struct soft_context *context = soft_context(verbs->context);
  soft_stop_receiving(qp);
  forget_receives(qp);
  soft_forget_held(qp);
  leave_peer(qp);
  if (context->segment->layout) atomic_store(&qp->shared->qp_num, 0);
  context->positions[verbs->handle] = qp->rq_posted;
  soft_cq_detach(qp);
  soft_bounce_empty(context);
  soft_pd(verbs->pd)->users--;
  context->qps[verbs->handle] = NULL;
  free_qp(qp);
  return 0;
}

/* The transitions of UC and the attributes each needs and allows; any state also goes to RESET and to ERR. */
static const struct transition {
  enum ibv_qp_state from, to;
  int required, optional;
} transitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
     IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS},
};

static int check_mask(enum ibv_qp_state from, enum ibv_qp_state to, int mask) {
  mask &= ~(IBV_QP_STATE | IBV_QP_CUR_STATE);
  if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) return mask ? EINVAL : 0;
  for (size_t i = 0; i < sizeof transitions / sizeof *transitions; i++) {
    const struct transition *transition = &transitions[i];
    if (transition->from != from || transition->to != to) continue;
    bool complete = (mask & transition->required) == transition->required;
    bool allowed = !(mask & ~(transition->required | transition->optional));
    return complete && allowed ? 0 : EINVAL;
  }
  return EINVAL;
}

static int check_values(const struct soft_context *context, const struct ibv_qp_attr *attr, int mask) {
  const int access =
      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
  if ((mask & IBV_QP_PKEY_INDEX) && attr->pkey_index != 0) return EINVAL;
  if ((mask & IBV_QP_PORT) && attr->port_num != 1) return EINVAL;
  if ((mask & IBV_QP_ACCESS_FLAGS) && (attr->qp_access_flags & ~(unsigned)access)) return EINVAL;
  const struct soft_profile *profile = context->profile;
  const unsigned wanted = (unsigned)profile->queue_pair_access;
  if ((mask & IBV_QP_ACCESS_FLAGS) && wanted && attr->qp_access_flags != wanted)
    return profile->access_error ? profile->access_error : ENOTSUP;
  const enum ibv_mtu most = profile->path_mtu;
  if ((mask & IBV_QP_PATH_MTU) && (attr->path_mtu < IBV_MTU_256 || attr->path_mtu > most)) return EINVAL;
  if ((mask & IBV_QP_DEST_QPN) && attr->dest_qp_num > QPN_MASK) return EINVAL;
  if (mask & IBV_QP_AV) {
    const struct ibv_ah_attr *ah = &attr->ah_attr;
    int memory = soft_memory_gid(context), index = ah->grh.sgid_index;
    if (!ah->is_global || index < memory || index > memory + context->addresses.count || ah->port_num != 1)
      return EINVAL;
  }
  return 0;
}

static void store_values(struct ibv_qp_attr *to, const struct ibv_qp_attr *from, int mask) {
  if (mask & IBV_QP_PKEY_INDEX) to->pkey_index = from->pkey_index;
  if (mask & IBV_QP_PORT) to->port_num = from->port_num;
  if (mask & IBV_QP_ACCESS_FLAGS) to->qp_access_flags = from->qp_access_flags;
  if (mask & IBV_QP_PATH_MTU) to->path_mtu = from->path_mtu;
  if (mask & IBV_QP_DEST_QPN) to->dest_qp_num = from->dest_qp_num;
  if (mask & IBV_QP_AV) to->ah_attr = from->ah_attr;
  if (mask & IBV_QP_RQ_PSN) to->rq_psn = from->rq_psn & PSN_MASK;
  if (mask & IBV_QP_SQ_PSN) to->sq_psn = from->sq_psn & PSN_MASK;
}

/* Lets the peer send. */
static void start_claims(struct soft_qp *qp, const struct ibv_qp_attr *attr, uint64_t peer_cookie) {
  struct shared_queue_pair *shared = qp->shared;
  atomic_store_explicit(&shared->peer_cookie, peer_cookie, memory_order_relaxed);
  atomic_store_explicit(&shared->peer_qp_num, attr->dest_qp_num, memory_order_relaxed);
  atomic_store_explicit(&shared->rq_psn, attr->rq_psn & PSN_MASK, memory_order_relaxed);
  atomic_store_explicit(&shared->claim, qp->rq_head, memory_order_release);
}

/* To the listener of a peer on another host. No peer on this one has the cookie 0, so none may send. */
static int connect_by_tcp(struct soft_qp *qp, const struct ibv_qp_attr *attr) {
  int error = soft_tcp_address(qp, &attr->ah_attr);
  if (!error) start_claims(qp, attr, 0);
  return error;
}

/* Maps the peer's segment, then lets the peer send. */
static int connect_by_memory(struct soft_qp *qp, const struct ibv_qp_attr *attr) {
  struct soft_remote *remote = &qp->remote;
  int error = segment_open(&attr->ah_attr.grh.dgid, &remote->segment);
  if (error) return error;
  if (remote->segment->layout->header.profile != soft_context(qp->verbs.context)->segment->layout->header.profile) {
    leave_peer(qp);
    return EINVAL;
  }
  remote->shared = &remote->segment->layout->queue_pairs[attr->dest_qp_num % SOFT_MAX_QP];
  if (atomic_load(&remote->shared->qp_num) == attr->dest_qp_num) atomic_store(&remote->shared->attached, 1);
  start_claims(qp, attr, remote->segment->cookie);
  return 0;
}

/* By the wire that the sender's own address is for. */
static int connect_peer(struct soft_qp *qp, const struct ibv_qp_attr *attr) {
  bool by_tcp = attr->ah_attr.grh.sgid_index != soft_memory_gid(soft_context(qp->verbs.context));
  return by_tcp ? connect_by_tcp(qp, attr) : connect_by_memory(qp, attr);
}

/* The sender of a message that was too long has closed the claim: the device, too, fails the queue pair then
 * and not when the completion is polled. */
static void notice_failure(struct soft_qp *qp) {
  bool receiving = qp->verbs.state == IBV_QPS_RTR || qp->verbs.state == IBV_QPS_RTS;
  if (receiving && (atomic_load(&qp->shared->claim) & CLAIM_CLOSED)) soft_qp_fail(qp);
}

/* EINVAL for a transition, a mask or a value that is not allowed. To INIT also EIO, if the context is tainted, and what
 * the profile rejects access flags with; to RTR also what segment_open returns, EINVAL if the peer plays another
 * device, or is on another host without a key, or this port is in a bridge, and ETIMEDOUT if the device is a cable to
 * another peer: the queue pair then stays in INIT. */
int soft_modify_qp(struct ibv_qp *verbs, struct ibv_qp_attr *attr, int attr_mask) {
  struct soft_qp *qp = soft_qp(verbs);
  struct soft_context *context = soft_context(verbs->context);
  notice_failure(qp);
  enum ibv_qp_state from = verbs->state;
  enum ibv_qp_state to = attr_mask & IBV_QP_STATE ? attr->qp_state : from;
  if ((attr_mask & IBV_QP_CUR_STATE) && attr->cur_qp_state != from) return soft_error(EINVAL);
  int error = to == IBV_QPS_ERR && !context->profile->goes_to_err ? EINVAL : check_mask(from, to, attr_mask);
  if (!error) error = check_values(context, attr, attr_mask);
  if (!error && from == IBV_QPS_RESET && to == IBV_QPS_INIT && context->tainted) error = EIO;
  if (!error && from == IBV_QPS_INIT && to == IBV_QPS_RTR) {
    error = context->faults.bridged ? EINVAL : soft_single_peer_check(context, &attr->ah_attr);
    if (!error) error = connect_peer(qp, attr);
    if (!error) soft_single_peer_connect(context, &attr->ah_attr);
  }
  if (error) return soft_error(error);

  if (to == IBV_QPS_RESET)
    reset(qp);
  else if (to == IBV_QPS_ERR)
    soft_qp_fail(qp);
  else
    store_values(&qp->attr, attr, attr_mask);
  if (attr_mask & IBV_QP_ACCESS_FLAGS) atomic_store(&qp->shared->access, attr->qp_access_flags);
  if (from == IBV_QPS_RTR && to == IBV_QPS_RTS && qp->tcp) soft_tcp_start(qp);
  if (to == IBV_QPS_RTR && !context->profile->late_regions) qp->last_mr = context->mrs_registered;
  verbs->state = to;
  if (context->segment->named) soft_remove_name(context);
  return 0;
}

int soft_query_qp(struct ibv_qp *verbs, struct ibv_qp_attr *attr, int attr_mask, struct ibv_qp_init_attr *init_attr) {
  struct soft_qp *qp = soft_qp(verbs);
  (void)attr_mask; /* the library, too, may fill in more than was asked for */
  const bool no_depth = soft_context(verbs->context)->profile->no_depth;
  notice_failure(qp);
  if (no_depth && verbs->state == IBV_QPS_RESET) return soft_error(EINVAL);
  *attr = qp->attr;
  attr->qp_state = attr->cur_qp_state = verbs->state;
  attr->cap = no_depth ? (struct ibv_qp_cap){0} : qp->cap;
  *init_attr = (struct ibv_qp_init_attr){
      .qp_context = verbs->qp_context,
      .send_cq = verbs->send_cq,
      .recv_cq = verbs->recv_cq,
      .cap = attr->cap,
      .qp_type = verbs->qp_type,
      .sq_sig_all = qp->sq_sig_all,
  };
  return 0;
}
