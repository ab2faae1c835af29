#include "queue_pair.h"

#include "debug.h"
#include "error.h"
#include "explain.h"
#include "frames.h"
#include "transport.h"

#include <errno.h>

int queue_pair_fail(const struct channel *channel, const char *verb, int error) {
  char text[VERBS_EXPLANATION_BYTES];
  verbs_explain(verb, error, text, sizeof text);
  return fail(MLXDIST_TRANSPORT, "device %s of provider %s: %s on the %s queue pair of rank %d to rank %d failed: %s",
              channel->device->name, channel->device->verbs->name, verb, channel_name(channel),
              channel->transport->rank, channel->peer, text);
}

/* Whether query_qp says how deep the queues are: a provider may refuse the call in RESET, or report nothing. */
static bool read_depth(const struct channel *channel, struct ibv_qp_cap *given) {
  struct ibv_qp_attr attr = {0};
  struct ibv_qp_init_attr init = {0};
  int error = channel->device->verbs->query_qp(channel->qp, &attr, IBV_QP_CAP, &init);
  if (error || !attr.cap.max_send_wr || !attr.cap.max_recv_wr) return false;
  *given = attr.cap;
  return true;
}

/* The device may make queues deeper than asked for, or less deep; one that counts frames does so here too. */
static int check_depth(const struct channel *channel, const struct ibv_qp_cap *asked, const struct ibv_qp_cap *given) {
  debug(DEBUG_INFO, "connection", "the %s queue pair to rank %d: queues of %u and %u, %u and %u asked for",
        channel_name(channel), channel->peer, given->max_send_wr, given->max_recv_wr, asked->max_send_wr,
        asked->max_recv_wr);
  bool known = given->max_send_wr && given->max_recv_wr;
  if (!known || (given->max_send_wr >= asked->max_send_wr && given->max_recv_wr >= asked->max_recv_wr))
    return MLXDIST_OK;
  return fail(MLXDIST_RESOURCES,
              "device %s made queues of %u and %u for the %s queue pair to rank %d, which needs %u "
              "and %u; lower MLXDIST_%s",
              channel->device->name, given->max_send_wr, given->max_recv_wr, channel_name(channel), channel->peer,
              asked->max_send_wr, asked->max_recv_wr,
              channel_kind(channel) == WIRE_BULK ? "BULK_SLOTS" : "EAGER_SLOTS");
}

int queue_pair_create(struct channel *channel) {
  struct device *device = channel->device;
  uint32_t frames = frames_of_slot(device, channel->slot_bytes);
  struct ibv_qp_init_attr init = {
      .send_cq = device->cq,
      .recv_cq = device->cq,
      /* Twice the slots: acknowledged messages may still wait in the send queue for the next signaled one. */
      .cap = {.max_send_wr = 2 * channel->slots * frames,
              .max_recv_wr = channel->slots * frames,
              .max_send_sge = device->gathers ? 2 : 1,
              .max_recv_sge = 1},
      .qp_type = channel->transport->options->reliable ? IBV_QPT_RC : IBV_QPT_UC,
  };
  const struct ibv_qp_cap asked = init.cap;
  channel->qp = device_create_qp(device, &init);
  if (!channel->qp) return queue_pair_fail(channel, "create_qp", errno);
  struct ibv_qp_cap given = init.cap;
  bool reported = read_depth(channel, &given);
  int status = device_init_qp(device, channel->qp);
  if (status) return status;
  if (!reported && !read_depth(channel, &given) && device->queue_pairs == 1) /* once is enough */
    debug(DEBUG_WARN, "connection",
          "device %s does not report the depth of its queues (query_qp); mlxdist relies on "
          "what create_qp returned",
          device->name);
  return check_depth(channel, &asked, &given);
}

int queue_pair_destroy(struct channel *channel) {
  int error = channel->qp ? device_destroy_qp(channel->device, channel->qp) : 0;
  channel->qp = 0;
  return error;
}

/* RC has a few more attributes. What gets no answer is tried again six times, each after 4.096 us * 2^15 = 134 ms: to
 * some drivers 7 is no limit, and a queue pair that never fails is never re-created. What meets no receive is tried for
 * ever: credits rule that out. */
static int to_rtr(struct channel *channel, struct ibv_qp_attr *attr) {
  int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
  if (channel->qp->qp_type == IBV_QPT_RC) {
    attr->min_rnr_timer = 12; /* 0.64 ms */
    mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  }
  return channel->device->verbs->modify_qp(channel->qp, attr, mask);
}

static int to_rts(struct channel *channel, uint32_t psn) {
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .sq_psn = psn};
  int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
  if (channel->qp->qp_type == IBV_QPT_RC) {
    attr.timeout = 15;
    attr.retry_cnt = 6;
    attr.rnr_retry = 7;
    mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
  }
  return channel->device->verbs->modify_qp(channel->qp, &attr, mask);
}

/* Over Thunderbolt some use the 4096 that the port says, and others 1024 because more was refused. */
static int to_rtr_with_any_mtu(struct channel *channel, struct ibv_qp_attr *attr) {
  attr->path_mtu = channel->link->mtu;
  int error = to_rtr(channel, attr);
  if (error != EINVAL || !channel->device->whole_frames || attr->path_mtu <= IBV_MTU_1024) return error;
  attr->path_mtu = IBV_MTU_1024;
  if (to_rtr(channel, attr)) return error; /* it is something else */
  debug(DEBUG_WARN, "connection", "device %s refused the path MTU %d of its port to rank %d, and took 1024",
        channel->device->name, 128 << channel->link->mtu, channel->peer);
  return 0;
}

int queue_pair_connect(struct channel *channel, const union ibv_gid *gid, uint16_t lid, uint32_t qp_num,
                       uint32_t remote_psn, uint32_t local_psn) {
  struct ibv_qp_attr attr = {
      .qp_state = IBV_QPS_RTR,
      .dest_qp_num = qp_num,
      .rq_psn = remote_psn,
      .ah_attr = {.grh = {.dgid = *gid, .sgid_index = (uint8_t)channel->link->gid_index, .hop_limit = 1},
                  .dlid = lid,
                  .is_global = 1,
                  .port_num = 1},
  };
  int error = to_rtr_with_any_mtu(channel, &attr);
  if (error) return queue_pair_fail(channel, "modify_qp to RTR", error);
  error = to_rts(channel, local_psn);
  return error ? queue_pair_fail(channel, "modify_qp to RTS", error) : MLXDIST_OK;
}
