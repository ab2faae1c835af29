/* See soft_side.h. Every unexpected result of a call fails the test. */
#define _POSIX_C_SOURCE 200809L
#include "soft_side.h"

#include "../verbs/wc_status.h"
#include "check.h"

#include <arpa/inet.h>
#include <errno.h>
#include <sched.h>
#include <time.h>

#define POLL_SECONDS 60

static struct ibv_context *open_device(const struct verbs *verbs, int device) {
  int count = 0;
  struct ibv_device **list = verbs->get_device_list(&count);
  CHECK(list && count > device);
  struct ibv_context *context = verbs->open_device(list[device]);
  CHECK(context, "open_device: %s", strerror(errno));
  verbs->free_device_list(list);
  return context;
}

struct ibv_context *side_open_device(void) { return open_device(verbs_soft(), 0); }

struct ibv_qp *side_create_qp(struct side *side, struct side_options options) {
  struct ibv_device_attr device;
  CHECK_EQUAL(verbs_soft()->query_device(side->context, &device), 0);
  struct ibv_qp_init_attr attr = {
      .send_cq = side->cq,
      .recv_cq = side->cq,
      .cap = {.max_send_wr = options.max_send_wr,
              .max_recv_wr = options.max_recv_wr,
              .max_send_sge = (uint32_t)device.max_sge,
              .max_recv_sge = 1},
      .qp_type = IBV_QPT_UC,
      .sq_sig_all = options.sq_sig_all,
  };
  return verbs_soft()->create_qp(side->pd, &attr);
}

struct ibv_context *side_open_context(struct side_options options) {
  const struct verbs *verbs = options.profile ? verbs_soft_profile(options.profile) : verbs_soft();
  struct ibv_context *context = open_device(verbs, options.device);
  verbs->set_virtual_host(context, options.host);
  if (options.key) CHECK_EQUAL(verbs->set_key(context, options.key), 0);
  return context;
}

static uint8_t memory_gid(struct ibv_context *context) {
  enum verbs_gid_type type;
  uint8_t index = 0;
  while (verbs_soft()->query_gid_type(context, 1, index, &type) == 0 && type != VERBS_GID_MEMORY) index++;
  return index;
}

static uint8_t find_gid(struct ibv_context *context, const char *address) {
  struct ibv_port_attr port;
  union ibv_gid wanted = {.raw = {[10] = 0xff, [11] = 0xff}}, gid;
  CHECK_EQUAL(inet_pton(AF_INET, address, wanted.raw + 12), 1);
  CHECK_EQUAL(verbs_soft()->query_port(context, 1, &port), 0);
  for (uint8_t i = 1; i < port.gid_tbl_len; i++) {
    CHECK_EQUAL(verbs_soft()->query_gid(context, 1, i, &gid), 0);
    if (memcmp(&gid, &wanted, sizeof gid) == 0) return i;
  }
  CHECK(0, "no interface has the address %s", address);
}

void side_open(struct side *side, struct side_options options) {
  const struct verbs *verbs = verbs_soft();
  *side = (struct side){.context = side_open_context(options)};
  side->pd = verbs->alloc_pd(side->context);
  CHECK(side->pd);
  side->cq = verbs->create_cq(side->context, options.cqe, NULL, NULL, 0);
  CHECK(side->cq, "create_cq: %s", strerror(errno));
  side->qp = side_create_qp(side, options);
  CHECK(side->qp, "create_qp: %s", strerror(errno));
  side->memory = verbs->alloc_memory(side->context, SIDE_BYTES);
  CHECK(side->memory, "alloc_memory: %s", strerror(errno));
  side->mr =
      verbs->reg_mr(side->pd, side->memory, SIDE_BYTES, options.access ? options.access : IBV_ACCESS_LOCAL_WRITE);
  CHECK(side->mr, "reg_mr: %s", strerror(errno));
  side->gid_index = options.key ? find_gid(side->context, options.address ? options.address : "127.0.0.1")
                                : memory_gid(side->context);
  CHECK_EQUAL(verbs->query_gid(side->context, 1, side->gid_index, &side->gid), 0);
  struct ibv_port_attr port;
  CHECK_EQUAL(verbs->query_port(side->context, 1, &port), 0);
  side->lid = port.lid;
}

void side_close(struct side *side) {
  const struct verbs *verbs = verbs_soft();
  CHECK_EQUAL(verbs->destroy_qp(side->qp), 0);
  CHECK_EQUAL(verbs->dereg_mr(side->mr), 0);
  verbs->free_memory(side->context, side->memory, SIDE_BYTES);
  CHECK_EQUAL(verbs->destroy_cq(side->cq), 0);
  CHECK_EQUAL(verbs->dealloc_pd(side->pd), 0);
  CHECK_EQUAL(verbs->close_device(side->context), 0);
}

void side_open_pair(struct side *a, struct side *b, struct side_options options) {
  side_open(a, options);
  side_open(b, options);
  side_connect(a, b);
}

void side_close_pair(struct side *a, struct side *b) {
  side_close(a);
  side_close(b);
}

struct side_address side_address(const struct side *side) {
  return (struct side_address){
      .gid = side->gid, .qp_num = side->qp->qp_num, .lid = side->lid, .gid_index = side->gid_index};
}

struct ibv_qp_attr side_attr(enum ibv_qp_state state, struct side_address peer) {
  return (struct ibv_qp_attr){
      .qp_state = state,
      .port_num = 1,
      .qp_access_flags = IBV_ACCESS_LOCAL_WRITE,
      .path_mtu = IBV_MTU_4096,
      .dest_qp_num = peer.qp_num,
      .rq_psn = SIDE_PSN,
      .sq_psn = SIDE_PSN,
      .ah_attr = {.is_global = 1,
                  .port_num = 1,
                  .dlid = peer.lid,
                  .grh = {.dgid = peer.gid, .hop_limit = 1, .sgid_index = peer.gid_index}},
  };
}

int side_mask(enum ibv_qp_state state) {
  switch (state) {
    case IBV_QPS_INIT: return INIT_MASK;
    case IBV_QPS_RTR: return RTR_MASK;
    case IBV_QPS_RTS: return RTS_MASK;
    default: return IBV_QP_STATE;
  }
}

int side_modify(struct ibv_qp *qp, enum ibv_qp_state state, struct side_address peer) {
  struct ibv_qp_attr attr = side_attr(state, peer);
  return verbs_soft()->modify_qp(qp, &attr, side_mask(state));
}

void side_to_rts(struct ibv_qp *qp, struct side_address peer) {
  CHECK_EQUAL(side_modify(qp, IBV_QPS_INIT, peer), 0);
  CHECK_EQUAL(side_modify(qp, IBV_QPS_RTR, peer), 0);
  CHECK_EQUAL(side_modify(qp, IBV_QPS_RTS, peer), 0);
}

void side_connect(struct side *a, struct side *b) {
  side_to_rts(a->qp, side_address(b));
  side_to_rts(b->qp, side_address(a));
}

enum ibv_qp_state side_state(struct ibv_qp *qp) {
  struct ibv_qp_attr attr;
  struct ibv_qp_init_attr init_attr;
  CHECK_EQUAL(verbs_soft()->query_qp(qp, &attr, IBV_QP_STATE, &init_attr), 0);
  CHECK_EQUAL(attr.qp_state, qp->state);
  return attr.qp_state;
}

int side_send(struct side *side, uint64_t wr_id, size_t offset, size_t length, unsigned send_flags) {
  struct ibv_sge sge = {(uintptr_t)side->memory + offset, (uint32_t)length, side->mr->lkey};
  struct ibv_send_wr wr = {
      .wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = send_flags};
  struct ibv_send_wr *bad = NULL;
  int error = ibv_post_send(side->qp, &wr, &bad);
  CHECK(bad == (error ? &wr : NULL), "bad_wr after error %d", error);
  return error;
}

int side_receive(struct side *side, uint64_t wr_id, size_t offset, size_t length) {
  struct ibv_sge sge = {(uintptr_t)side->memory + offset, (uint32_t)length, side->mr->lkey};
  struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1};
  struct ibv_recv_wr *bad = NULL;
  int error = ibv_post_recv(side->qp, &wr, &bad);
  CHECK(bad == (error ? &wr : NULL), "bad_wr after error %d", error);
  return error;
}

void side_poll(struct side *side, struct ibv_wc *wc, int count) {
  time_t deadline = time(NULL) + POLL_SECONDS;
  int got = 0;
  while (got < count) {
    int n = ibv_poll_cq(side->cq, count - got, wc + got);
    CHECK(n >= 0, "poll_cq returned %d", n);
    got += n;
    CHECK(time(NULL) < deadline, "%d of %d completions after %d s", got, count, POLL_SECONDS);
    if (n == 0) sched_yield();
  }
  struct ibv_wc more;
  CHECK_EQUAL(ibv_poll_cq(side->cq, 1, &more), 0);
}

struct ibv_wc side_poll_one(struct side *side, uint64_t wr_id, enum ibv_wc_status status) {
  struct ibv_wc wc;
  side_poll(side, &wc, 1);
  CHECK_EQUAL(wc.wr_id, wr_id);
  CHECK(wc.status == status, "wr_id %llu completed with %s", (unsigned long long)wr_id,
        verbs_wc_status_name(wc.status));
  CHECK_EQUAL(wc.qp_num, side->qp->qp_num);
  return wc;
}

struct verbs_counters side_counters(const struct side *side) {
  struct verbs_counters counters;
  verbs_soft()->read_counters(side->context, &counters);
  return counters;
}

static char pattern(size_t i, unsigned seed) { return (char)((i * 31 + (i >> 8) * 17 + seed * 101 + 7) & 0xff); }

void side_fill(char *memory, size_t length, unsigned seed) {
  for (size_t i = 0; i < length; i++) memory[i] = pattern(i, seed);
}

void side_verify(const char *memory, size_t length, unsigned seed) {
  for (size_t i = 0; i < length; i++)
    CHECK(memory[i] == pattern(i, seed), "byte %zu of %zu is %d, expected %d", i, length, memory[i], pattern(i, seed));
}
