/* RDMA_WRITE: where it may write, it does, and nowhere else. */
#define _GNU_SOURCE
#include "check.h"
#include "softverbs_end.h"

#include <errno.h>

static void test_write(void) {
  struct end a, b;
  open_pair(&a, &b);
  struct address peer = address_of(&b);
  for (unsigned i = 0; i < SIZES; i++) {
    memset(b.memory, 0x55, BYTES);
    fill(a.memory, sizes[i], i);
    CHECK_EQUAL(post(&a, IBV_WR_RDMA_WRITE, i, sizes[i], &peer, 77), 0);
    CHECK_EQUAL(poll_one(&a, i, IBV_WC_SUCCESS).opcode, IBV_WC_RDMA_WRITE);
    verify(b.memory + 77, sizes[i], i);
    CHECK(b.memory[76] == 0x55 && b.memory[77 + sizes[i]] == 0x55);
    expect_nothing(&b);
  }
  close_pair(&a, &b);
}

static void test_write_with_immediate(void) {
  struct end a, b;
  open_pair(&a, &b);
  struct address peer = address_of(&b);
  memset(b.memory, 0x55, BYTES);
  fill(a.memory, 999, 3);
  CHECK_EQUAL(receive(&b, 1, 5000, 8), 0); /* shorter than what is written */
  CHECK_EQUAL(post(&a, IBV_WR_RDMA_WRITE_WITH_IMM, 2, 999, &peer, 100), 0);
  poll_one(&a, 2, IBV_WC_SUCCESS);
  struct ibv_wc wc = poll_one(&b, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
  CHECK_EQUAL(wc.wc_flags, IBV_WC_WITH_IMM);
  CHECK_EQUAL(wc.imm_data, IMMEDIATE);
  CHECK_EQUAL(wc.byte_len, 999);
  verify(b.memory + 100, 999, 3);
  CHECK_EQUAL(b.memory[5000], 0x55); /* the receive's own buffer is left alone */
  /* Without a receive it is lost, and the next message finds everything in order. */
  CHECK_EQUAL(post(&a, IBV_WR_RDMA_WRITE_WITH_IMM, 3, 10, &peer, 0), 0);
  poll_one(&a, 3, IBV_WC_SUCCESS);
  CHECK_EQUAL(receive(&b, 4, 0, 10), 0);
  CHECK_EQUAL(send_bytes(&a, 5, 10), 0);
  CHECK_EQUAL(poll_one(&b, 4, IBV_WC_SUCCESS).opcode, IBV_WC_RECV);
  close_pair(&a, &b);
}

/* What a write must not do: `peer` is wrong in some way, so the bytes stay as they are, and the connection too. */
static void expect_dropped(struct end *a, struct end *b, struct address peer, size_t remote, size_t bytes) {
  memset(a->memory, 0x11, BYTES);
  memset(b->memory, 0x55, BYTES);
  CHECK_EQUAL(post(a, IBV_WR_RDMA_WRITE, 1, bytes, &peer, remote), 0);
  poll_one(a, 1, IBV_WC_SUCCESS);
  for (size_t i = 0; i < BYTES; i++) CHECK(b->memory[i] == 0x55, "byte %zu was written", i);
  CHECK_EQUAL(receive(b, 2, 0, 4), 0);
  CHECK_EQUAL(post(a, IBV_WR_RDMA_WRITE_WITH_IMM, 3, bytes, &peer, remote), 0);
  poll_one(a, 3, IBV_WC_SUCCESS);
  expect_nothing(b); /* the receive is not taken either */
  CHECK_EQUAL(send_bytes(a, 4, 4), 0);
  poll_one(a, 4, IBV_WC_SUCCESS);
  poll_one(b, 2, IBV_WC_SUCCESS);
}

static void test_writes_that_are_dropped(void) {
  struct end a, b;
  open_pair(&a, &b);
  struct address good = address_of(&b), wrong = good;
  wrong.rkey++;
  expect_dropped(&a, &b, wrong, 0, 8);
  wrong.rkey = 0;
  expect_dropped(&a, &b, wrong, 0, 8);
  expect_dropped(&a, &b, good, BYTES - 7, 8);
  expect_dropped(&a, &b, good, BYTES, 8);
  expect_dropped(&a, &b, good, (size_t)-1, 8);
  wrong = good, wrong.memory = UINT64_MAX - 3;
  expect_dropped(&a, &b, wrong, 0, 8);

  struct ibv_pd *pd = ibv_alloc_pd(b.context);
  struct ibv_mr *others[] = {
      ibv_reg_mr(b.pd, b.memory, BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ), /* not for writing */
      ibv_reg_mr(pd, b.memory, BYTES, ACCESS),                                            /* another domain's */
      ibv_reg_mr(b.pd, b.memory, BYTES, ACCESS),                                          /* gone */
  };
  for (int i = 0; i < 3; i++) {
    CHECK(others[i]);
    wrong = good, wrong.rkey = others[i]->rkey;
    if (i == 2) CHECK_EQUAL(ibv_dereg_mr(others[i]), 0);
    expect_dropped(&a, &b, wrong, 0, 8);
  }
  CHECK_EQUAL(ibv_dereg_mr(others[0]), 0);
  CHECK_EQUAL(ibv_dereg_mr(others[1]), 0);
  CHECK_EQUAL(ibv_dealloc_pd(pd), 0);

  struct ibv_qp_attr attr = {.qp_access_flags = IBV_ACCESS_LOCAL_WRITE};
  CHECK_EQUAL(ibv_modify_qp(b.qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
  expect_dropped(&a, &b, good, 0, 8);
  attr.qp_access_flags = ACCESS;
  CHECK_EQUAL(ibv_modify_qp(b.qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
  CHECK_EQUAL(post(&a, IBV_WR_RDMA_WRITE, 5, 8, &good, 0), 0);
  CHECK_EQUAL(b.memory[0], 0x11);
  close_pair(&a, &b);
}

static void test_no_write_after_reset(void) {
  struct end a, b;
  open_pair(&a, &b);
  struct address peer = address_of(&b);
  memset(a.memory, 0x11, 8);
  memset(b.memory, 0x55, 8);
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RESET};
  CHECK_EQUAL(ibv_modify_qp(b.qp, &attr, IBV_QP_STATE), 0);
  CHECK_EQUAL(post(&a, IBV_WR_RDMA_WRITE, 1, 8, &peer, 0), 0);
  poll_one(&a, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(b.memory[0], 0x55);
  close_pair(&a, &b);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Write", test_write},
      {"WriteWithImmediate", test_write_with_immediate},
      {"WritesThatAreDropped", test_writes_that_are_dropped},
      {"NoWriteAfterReset", test_no_write_after_reset},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
