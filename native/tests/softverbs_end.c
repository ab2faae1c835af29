#define _GNU_SOURCE
#include "softverbs_end.h"

#include "check.h"

#include <errno.h>
#include <sched.h>

struct ibv_context *open_device(void) {
  int count = 0;
  struct ibv_device **list = ibv_get_device_list(&count);
  CHECK(list && count > 0, "there are no devices");
  struct ibv_context *context = ibv_open_device(list[0]);
  CHECK(context, "ibv_open_device: %s", strerror(errno));
  ibv_free_device_list(list);
  return context;
}

struct ibv_qp *create_qp(struct end *end, int sq_sig_all) {
  struct ibv_qp_init_attr attr = {
      .send_cq = end->cq,
      .recv_cq = end->cq,
      .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1},
      .qp_type = IBV_QPT_UC,
      .sq_sig_all = sq_sig_all,
  };
  return ibv_create_qp(end->pd, &attr);
}

void to_init(struct ibv_qp *qp) {
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = PORT, .qp_access_flags = ACCESS};
  int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  CHECK_EQUAL(ibv_modify_qp(qp, &attr, mask), 0);
}

struct end open_end(char *memory, size_t bytes, int cqe, int sq_sig_all) {
  struct end end = {.context = open_device(), .memory = memory};
  CHECK((end.pd = ibv_alloc_pd(end.context)), "ibv_alloc_pd: %s", strerror(errno));
  CHECK((end.cq = ibv_create_cq(end.context, cqe, NULL, NULL, 0)), "ibv_create_cq: %s", strerror(errno));
  CHECK((end.mr = ibv_reg_mr(end.pd, memory, bytes, ACCESS)), "ibv_reg_mr: %s", strerror(errno));
  CHECK((end.qp = create_qp(&end, sq_sig_all)), "ibv_create_qp: %s", strerror(errno));
  to_init(end.qp);
  return end;
}

void close_end(struct end *end) {
  CHECK_EQUAL(ibv_destroy_qp(end->qp), 0);
  CHECK_EQUAL(ibv_dereg_mr(end->mr), 0);
  CHECK_EQUAL(ibv_destroy_cq(end->cq), 0);
  CHECK_EQUAL(ibv_dealloc_pd(end->pd), 0);
  CHECK_EQUAL(ibv_close_device(end->context), 0);
}

struct address address_of(const struct end *end) {
  struct address address = {
      .gid_index = end->gid_index,
      .qp_num = end->qp->qp_num,
      .rkey = end->mr->rkey,
      .memory = (uintptr_t)end->memory,
  };
  CHECK_EQUAL(ibv_query_gid(end->context, PORT, end->gid_index, &address.gid), 0);
  return address;
}

int to_rtr(struct ibv_qp *qp, const struct address *peer) {
  struct ibv_global_route route = {.dgid = peer->gid, .sgid_index = (uint8_t)peer->gid_index, .hop_limit = 1};
  struct ibv_qp_attr attr = {
      .qp_state = IBV_QPS_RTR,
      .path_mtu = IBV_MTU_1024,
      .dest_qp_num = peer->qp_num,
      .rq_psn = PSN,
      .ah_attr = {.is_global = 1, .port_num = PORT, .grh = route},
  };
  return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN);
}

void to_rts(struct ibv_qp *qp, const struct address *peer) {
  CHECK_EQUAL(to_rtr(qp, peer), 0);
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .sq_psn = PSN};
  CHECK_EQUAL(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN), 0);
}

void join(struct end *a, struct end *b) {
  struct address of_a = address_of(a), of_b = address_of(b);
  to_rts(a->qp, &of_b);
  to_rts(b->qp, &of_a);
}

void open_pair(struct end *a, struct end *b) {
  char *memory[2] = {malloc(BYTES), malloc(BYTES)};
  CHECK(memory[0] && memory[1]);
  *a = open_end(memory[0], BYTES, 4 * DEPTH, 1);
  *b = open_end(memory[1], BYTES, 4 * DEPTH, 1);
  join(a, b);
}

void close_pair(struct end *a, struct end *b) {
  close_end(a);
  close_end(b);
  free(a->memory);
  free(b->memory);
}

enum ibv_qp_state state_of(struct ibv_qp *qp) {
  struct ibv_qp_attr attr;
  struct ibv_qp_init_attr init;
  CHECK_EQUAL(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init), 0);
  return attr.qp_state;
}

void fill(char *memory, size_t bytes, unsigned seed) {
  for (size_t i = 0; i < bytes; i++) memory[i] = (char)(seed * 31 + i * 7 + i / 251);
}

void verify(const char *memory, size_t bytes, unsigned seed) {
  for (size_t i = 0; i < bytes; i++)
    CHECK(memory[i] == (char)(seed * 31 + i * 7 + i / 251), "byte %zu of %zu is wrong", i, bytes);
}

int receive_at(struct end *end, uint64_t id, char *to, size_t bytes, uint32_t lkey) {
  struct ibv_sge sge = {.addr = (uintptr_t)to, .length = (uint32_t)bytes, .lkey = lkey};
  struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1}, *bad;
  return ibv_post_recv(end->qp, &wr, &bad);
}

int receive(struct end *end, uint64_t id, size_t offset, size_t bytes) {
  return receive_at(end, id, end->memory + offset, bytes, end->mr->lkey);
}

struct ibv_send_wr request(struct end *end, struct ibv_sge *sge, enum ibv_wr_opcode opcode, uint64_t id, size_t bytes,
                           const struct address *peer, size_t remote) {
  *sge = (struct ibv_sge){.addr = (uintptr_t)end->memory, .length = (uint32_t)bytes, .lkey = end->mr->lkey};
  struct ibv_send_wr wr = {.wr_id = id, .sg_list = sge, .num_sge = 1, .opcode = opcode, .imm_data = IMMEDIATE};
  if (peer) {
    wr.wr.rdma.remote_addr = peer->memory + remote;
    wr.wr.rdma.rkey = peer->rkey;
  }
  return wr;
}

int post(struct end *end, enum ibv_wr_opcode opcode, uint64_t id, size_t bytes, const struct address *peer,
         size_t remote) {
  struct ibv_sge sge;
  struct ibv_send_wr wr = request(end, &sge, opcode, id, bytes, peer, remote), *bad;
  return ibv_post_send(end->qp, &wr, &bad);
}

int send_bytes(struct end *end, uint64_t id, size_t bytes) { return post(end, IBV_WR_SEND, id, bytes, NULL, 0); }

struct ibv_wc poll_one(struct end *end, uint64_t id, enum ibv_wc_status status) {
  struct ibv_wc wc;
  int count;
  while ((count = ibv_poll_cq(end->cq, 1, &wc)) == 0) sched_yield(); /* check.h ends a test that waits in vain */
  CHECK_EQUAL(count, 1);
  CHECK_EQUAL(wc.wr_id, id);
  CHECK(wc.status == status, "work request %d: %s, expected %s", (int)id, ibv_wc_status_str(wc.status),
        ibv_wc_status_str(status));
  CHECK_EQUAL(wc.qp_num, end->qp->qp_num);
  return wc;
}

void expect_nothing(struct end *end) {
  struct ibv_wc wc;
  CHECK_EQUAL(ibv_poll_cq(end->cq, 1, &wc), 0);
}
