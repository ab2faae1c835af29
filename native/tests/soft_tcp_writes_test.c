/* RDMA_WRITE between hosts: the receiving side writes for its peer, where that may, and nowhere else. */
#define _GNU_SOURCE 1
#include "tcp_pair.h"

#include <errno.h>

#define WRITABLE (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)
#define BYTES 300000

static char region[BYTES + 200];

static void allow(struct side *b, unsigned access) {
  struct ibv_qp_attr attr = {.qp_access_flags = access};
  CHECK_EQUAL(verbs_soft()->modify_qp(b->qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
}

static struct ibv_mr *open_pair(struct side *a, struct side *b, int access) {
  tcp_open_pair(a, b, TCP_DEFAULTS);
  allow(b, WRITABLE);
  memset(region, 0x33, sizeof region);
  struct ibv_mr *mr = verbs_soft()->reg_mr(b->pd, region, sizeof region, access);
  CHECK(mr, "reg_mr: %s", strerror(errno));
  return mr;
}

static void post(struct side *a, enum ibv_wr_opcode opcode, uint64_t remote, uint32_t rkey, uint32_t bytes) {
  struct ibv_sge sge = {(uintptr_t)a->memory, bytes, a->mr->lkey};
  struct ibv_send_wr wr = {.wr_id = 1,
                           .sg_list = &sge,
                           .num_sge = 1,
                           .opcode = opcode,
                           .imm_data = 0x1234,
                           .send_flags = IBV_SEND_SIGNALED},
                     *bad;
  wr.wr.rdma.remote_addr = remote;
  wr.wr.rdma.rkey = rkey;
  CHECK_EQUAL(ibv_post_send(a->qp, &wr, &bad), 0);
}

static void write_to(struct side *a, struct side *b, uint64_t remote, uint32_t rkey, uint32_t bytes) {
  post(a, IBV_WR_RDMA_WRITE, remote, rkey, bytes);
  CHECK_EQUAL(tcp_poll_one(a, b, 1, IBV_WC_SUCCESS).opcode, IBV_WC_RDMA_WRITE);
}

/* A message behind what was written has come, so that has, too. */
static void pass(struct side *a, struct side *b) {
  CHECK_EQUAL(side_receive(b, 7, 0, 8), 0);
  CHECK_EQUAL(side_send(a, 8, 0, 8, 0), 0);
  tcp_poll_one(b, a, 7, IBV_WC_SUCCESS);
}

static void close_pair(struct side *a, struct side *b, struct ibv_mr *mr) {
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  side_close_pair(a, b);
}

static void test_sizes(void) {
  static const uint32_t sizes[] = {0, 1, 100, 8168, 8192, 65536, BYTES};
  struct side a, b;
  struct ibv_mr *mr = open_pair(&a, &b, WRITABLE);
  for (unsigned i = 0; i < 7; i++) {
    memset(region, 0x33, sizeof region);
    side_fill(a.memory, sizes[i], i);
    write_to(&a, &b, (uintptr_t)region + 100, mr->rkey, sizes[i]);
    pass(&a, &b);
    side_verify(region + 100, sizes[i], i);
    CHECK(region[99] == 0x33 && region[100 + sizes[i]] == 0x33);
  }
  CHECK_EQUAL(side_counters(&b).dropped, 0);
  close_pair(&a, &b, mr);
}

/* With immediate data it takes a receive, whose buffer it leaves alone; without one it writes nothing. */
static void test_immediate(void) {
  struct side a, b;
  struct ibv_mr *mr = open_pair(&a, &b, WRITABLE);
  post(&a, IBV_WR_RDMA_WRITE_WITH_IMM, (uintptr_t)region, mr->rkey, 1000);
  TCP_UNTIL(&a, &b, side_counters(&b).dropped == 1);
  tcp_poll_one(&a, &b, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(region[0], 0x33);
  memset(b.memory, 0x44, 16);
  CHECK_EQUAL(side_receive(&b, 3, 0, 16), 0);
  side_fill(a.memory, 1000, 1);
  post(&a, IBV_WR_RDMA_WRITE_WITH_IMM, (uintptr_t)region, mr->rkey, 1000);
  struct ibv_wc wc = tcp_poll_one(&b, &a, 3, IBV_WC_SUCCESS);
  CHECK_EQUAL(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  CHECK_EQUAL(wc.wc_flags, IBV_WC_WITH_IMM);
  CHECK_EQUAL(wc.imm_data, 0x1234);
  CHECK_EQUAL(wc.byte_len, 1000);
  side_verify(region, 1000, 1);
  CHECK_EQUAL(b.memory[0], 0x44);
  close_pair(&a, &b, mr);
}

/* Wrong key, wrong range, no right to the region, none by the queue pair: dropped, and the connection goes on. */
static void test_rejected(void) {
  struct side a, b;
  struct ibv_mr *mr = open_pair(&a, &b, WRITABLE);
  struct ibv_mr *readable = verbs_soft()->reg_mr(b.pd, region, sizeof region, IBV_ACCESS_LOCAL_WRITE);
  uint64_t start = (uintptr_t)region;
  uint64_t starts[] = {start, start, start - 1, start + 1, UINT64_MAX, start};
  uint32_t keys[] = {mr->rkey + 1, 0, mr->rkey, mr->rkey, mr->rkey, readable->rkey};
  for (int i = 0; i < 6; i++) write_to(&a, &b, starts[i], keys[i], i == 3 ? sizeof region : 10);
  allow(&b, IBV_ACCESS_LOCAL_WRITE);
  write_to(&a, &b, start, mr->rkey, 10);
  pass(&a, &b);
  allow(&b, WRITABLE);
  CHECK_EQUAL(side_counters(&b).dropped, 7);
  for (size_t i = 0; i < sizeof region; i++) CHECK_EQUAL(region[i], 0x33);
  write_to(&a, &b, start, mr->rkey, 10);
  pass(&a, &b);
  CHECK(region[0] != 0x33 || region[1] != 0x33);
  CHECK_EQUAL(verbs_soft()->dereg_mr(readable), 0);
  close_pair(&a, &b, mr);
}

/* The region goes while a write into it is on its way: not one byte comes after that. */
static void test_region_goes_away(void) {
  struct side a, b;
  struct ibv_mr *mr = open_pair(&a, &b, WRITABLE);
  int small = 16384;
  struct tcp_receiver *receiver = soft_context(b.context)->tcp->receivers;
  CHECK_EQUAL(setsockopt(receiver->fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small), 0);
  CHECK_EQUAL(setsockopt(soft_qp(a.qp)->tcp->fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small), 0);
  post(&a, IBV_WR_RDMA_WRITE, (uintptr_t)region, mr->rkey, BYTES);
  TCP_UNTIL(&b, &b, receiver->left > 0 && receiver->left < BYTES);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  memset(region, 0x55, sizeof region);
  tcp_poll_one(&a, &b, 1, IBV_WC_SUCCESS);
  pass(&a, &b);
  for (size_t i = 0; i < sizeof region; i++) CHECK_EQUAL(region[i], 0x55);
  CHECK_EQUAL(side_counters(&b).dropped, 1);
  side_close_pair(&a, &b);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Sizes", test_sizes},
      {"Immediate", test_immediate},
      {"Rejected", test_rejected},
      {"RegionGoesAway", test_region_goes_away},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
