/* Messages over the software provider: what is delivered, what is dropped, what completes, what a post refuses. */
#include "../providers/soft/soft.h"
#include "check.h"
#include "soft_side.h"

#include <errno.h>

/* Sends `length` bytes from `from` and checks every byte, and that none beyond them was touched. */
static void check_message(struct side *from, struct side *to, size_t length, unsigned seed) {
  const size_t target = SIDE_BYTES / 2 + 64;
  memset(to->memory + target - 64, 0x11, length + 128);
  side_fill(from->memory, length, seed);
  CHECK_EQUAL(side_receive(to, 100 + seed, target, length + 32), 0);
  CHECK_EQUAL(side_send(from, 200 + seed, 0, length, IBV_SEND_SIGNALED), 0);
  if (from != to) side_poll_one(from, 200 + seed, IBV_WC_SUCCESS);
  struct ibv_wc wc[2];
  side_poll(to, wc, from == to ? 2 : 1);
  const struct ibv_wc *received = &wc[from == to ? 1 : 0];
  CHECK_EQUAL(received->wr_id, 100 + seed);
  CHECK_EQUAL(received->status, IBV_WC_SUCCESS);
  CHECK_EQUAL(received->opcode, IBV_WC_RECV);
  CHECK_EQUAL(received->byte_len, length);
  CHECK_EQUAL(received->wc_flags, 0);
  side_verify(to->memory + target, length, seed);
  for (size_t i = 0; i < 64; i++) CHECK_EQUAL(to->memory[target - 64 + i], 0x11);
  for (size_t i = 0; i < 64; i++) CHECK_EQUAL(to->memory[target + length + i], 0x11);
}

static void test_send_sizes(void) {
  static const size_t sizes[] = {0, 1, 63, 64, 65, 4095, 4096, 4097, 256 << 10};
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  uint64_t bytes = 0;
  for (unsigned round = 0; round < 20; round++)
    for (unsigned i = 0; i < 9; i++) {
      check_message(&a, &b, sizes[i], round);
      check_message(&b, &a, sizes[i], round + 1);
      bytes += sizes[i];
    }
  struct verbs_counters counters = side_counters(&a);
  CHECK_EQUAL(counters.sends, 180);
  CHECK_EQUAL(counters.receives, 180);
  CHECK_EQUAL(counters.bytes_sent, bytes);
  CHECK_EQUAL(counters.dropped, 0);
  CHECK(counters.polls >= 360);
  side_close_pair(&a, &b);
}

/* A queue pair connected to itself: the segment is the context's own. */
static void test_loopback(void) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  side_to_rts(side.qp, side_address(&side));
  for (unsigned round = 0; round < 20; round++) check_message(&side, &side, 1000 + round, round);
  side_close(&side);
}

static void test_send_with_imm(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  CHECK_EQUAL(side_receive(&b, 1, 0, 0), 0);
  struct ibv_send_wr wr = {.opcode = IBV_WR_SEND_WITH_IMM, .imm_data = 0x12345678}, *bad;
  CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), 0);
  struct ibv_wc wc = side_poll_one(&b, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(wc.wc_flags, IBV_WC_WITH_IMM);
  CHECK_EQUAL(wc.imm_data, 0x12345678);
  CHECK_EQUAL(wc.byte_len, 0);
  side_close_pair(&a, &b);
}

/* Message n goes into receive n, however often the rings wrap and however the two sides take turns. */
static void test_order(void) {
  struct side a, b;
  struct side_options options = {.cqe = 64, .max_send_wr = 32, .max_recv_wr = 5};
  side_open_pair(&a, &b, options);
  uint64_t posted = 0, sent = 0, received = 0;
  for (unsigned round = 0; round < 3000; round++) {
    for (unsigned n = round % 6; n-- && posted - received < 5; posted++)
      CHECK_EQUAL(side_receive(&b, posted, posted % 64 * 8, 8), 0);
    for (unsigned n = round % 4; n-- && sent < posted; sent++) {
      memcpy(a.memory, &sent, 8);
      CHECK_EQUAL(side_send(&a, sent, 0, 8, IBV_SEND_SIGNALED), 0);
      side_poll_one(&a, sent, IBV_WC_SUCCESS);
    }
    for (; received < sent; received++) {
      struct ibv_wc wc;
      if (ibv_poll_cq(b.cq, 1, &wc) == 0) break;
      uint64_t value;
      memcpy(&value, b.memory + received % 64 * 8, 8);
      CHECK_EQUAL(wc.wr_id, received);
      CHECK_EQUAL(value, received);
    }
    CHECK_EQUAL(received, sent);
  }
  CHECK(sent > 2000, "only %llu messages", (unsigned long long)sent);
  CHECK_EQUAL(side_counters(&a).dropped, 0);
  side_close_pair(&a, &b);
}

static void test_drop_without_receive(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  side_fill(a.memory, 64, 1);
  CHECK_EQUAL(side_send(&a, 1, 0, 64, IBV_SEND_SIGNALED), 0);
  side_poll_one(&a, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_counters(&a).dropped, 1);
  CHECK_EQUAL(side_counters(&a).bytes_sent, 0);

  /* The lost message does not come back: the receive posted now gets the next one. */
  side_fill(a.memory, 64, 2);
  CHECK_EQUAL(side_receive(&b, 2, 0, 64), 0);
  CHECK_EQUAL(side_send(&a, 3, 0, 64, 0), 0);
  side_poll_one(&b, 2, IBV_WC_SUCCESS);
  side_verify(b.memory, 64, 2);
  CHECK_EQUAL(side_state(b.qp), IBV_QPS_RTS);
  side_close_pair(&a, &b);
}

/* A peer that is not ready, or was connected otherwise than the sender thinks, gets nothing. */
static void test_drop_unless_connected(void) {
  struct side a, b, c;
  side_open(&a, SIDE_DEFAULTS);
  side_open(&b, SIDE_DEFAULTS);
  side_open(&c, SIDE_DEFAULTS);
  struct side_address to_a = side_address(&a), to_b = side_address(&b), to_c = side_address(&c);
  side_to_rts(a.qp, to_b);
  uint64_t dropped = 0;
  CHECK_EQUAL(side_send(&a, 0, 0, 8, 0), 0); /* b is in RESET */
  CHECK_EQUAL(side_counters(&a).dropped, ++dropped);
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_INIT, to_a), 0);
  CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
  CHECK_EQUAL(side_send(&a, 0, 0, 8, 0), 0); /* b is in INIT */
  CHECK_EQUAL(side_counters(&a).dropped, ++dropped);

  struct side_address another_qp = to_a;
  another_qp.qp_num++;
  struct side_address peers[] = {to_c, another_qp, to_a};
  struct ibv_wc wc;
  for (int i = 0; i < 3; i++) {
    CHECK_EQUAL(side_modify(b.qp, IBV_QPS_RESET, to_a), 0);
    CHECK_EQUAL(side_modify(b.qp, IBV_QPS_INIT, to_a), 0);
    CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
    struct ibv_qp_attr rtr = side_attr(IBV_QPS_RTR, peers[i]);
    if (i == 2) rtr.rq_psn++; /* the right peer, of an earlier connection */
    CHECK_EQUAL(verbs_soft()->modify_qp(b.qp, &rtr, RTR_MASK), 0);
    CHECK_EQUAL(side_send(&a, 0, 0, 8, 0), 0);
    CHECK_EQUAL(side_counters(&a).dropped, ++dropped);
    CHECK_EQUAL(ibv_poll_cq(b.cq, 1, &wc), 0);
  }
  /* Packet numbers have 24 bits. */
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_RESET, to_a), 0);
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_INIT, to_a), 0);
  CHECK_EQUAL(side_receive(&b, 7, 0, 64), 0);
  struct ibv_qp_attr rtr = side_attr(IBV_QPS_RTR, to_a);
  rtr.rq_psn |= 1u << 24;
  CHECK_EQUAL(verbs_soft()->modify_qp(b.qp, &rtr, RTR_MASK), 0); /* in RTR it already receives */
  CHECK_EQUAL(side_send(&a, 0, 0, 8, 0), 0);
  side_poll_one(&b, 7, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_counters(&a).dropped, dropped);
  side_close(&a);
  side_close(&b);
  side_close(&c);
}

static void test_post_send_in_reset_init_rtr(void) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  struct side_address self = side_address(&side);
  for (enum ibv_qp_state state = IBV_QPS_RESET; state <= IBV_QPS_RTR; state++) {
    if (state != IBV_QPS_RESET) CHECK_EQUAL(side_modify(side.qp, state, self), 0);
    CHECK_EQUAL(side_send(&side, 1, 0, 8, IBV_SEND_SIGNALED), EINVAL);
  }
  CHECK_EQUAL(side_modify(side.qp, IBV_QPS_RTS, self), 0);
  CHECK_EQUAL(side_send(&side, 1, 0, 8, 0), 0);
  CHECK_EQUAL(side_counters(&side).sends, 1);
  side_close(&side);
}

static void test_post_recv_by_state(void) {
  struct side side;
  side_open(&side, SIDE_DEFAULTS);
  struct side_address self = side_address(&side);
  CHECK_EQUAL(side_receive(&side, 1, 0, 8), EINVAL);
  for (enum ibv_qp_state state = IBV_QPS_INIT; state <= IBV_QPS_RTS; state++) {
    CHECK_EQUAL(side_modify(side.qp, state, self), 0);
    CHECK_EQUAL(side_receive(&side, state, state * 8u, 8), 0);
  }
  for (unsigned i = 0; i < 3; i++) CHECK_EQUAL(side_send(&side, 9, 64, 8, 0), 0);
  struct ibv_wc wc[3];
  side_poll(&side, wc, 3);
  for (unsigned i = 0; i < 3; i++) CHECK_EQUAL(wc[i].wr_id, IBV_QPS_INIT + i);
  side_close(&side);
}

static void test_rejected_send(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  struct ibv_sge list[5] = {{(uintptr_t)a.memory, 8, a.mr->lkey}};
  const struct ibv_send_wr good = {.sg_list = list, .num_sge = 1, .opcode = IBV_WR_SEND};
  struct ibv_send_wr wr = good, *bad;
  static const int opcodes[] = {IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD, 99};
  for (int i = 0; i < 4; i++) {
    wr.opcode = (enum ibv_wr_opcode)opcodes[i];
    CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), EINVAL);
  }
  wr = good, wr.num_sge = 5;
  CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), EINVAL);
  wr = good, wr.num_sge = -1;
  CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), EINVAL);
  wr = good, wr.send_flags = IBV_SEND_INLINE;
  CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), EINVAL);
  wr = good, wr.send_flags = IBV_SEND_IP_CSUM;
  CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), EINVAL);
  list[0].length = SOFT_MAX_MESSAGE + 1;
  wr = good;
  CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), EINVAL);
  CHECK_EQUAL(side_counters(&a).sends, 0);
  CHECK_EQUAL(side_state(a.qp), IBV_QPS_RTS);
  side_close_pair(&a, &b);
}

static void test_rejected_receive(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  static char elsewhere[64];
  struct ibv_mr *mr = verbs_soft()->reg_mr(b.pd, elsewhere, sizeof elsewhere, IBV_ACCESS_LOCAL_WRITE);
  uint64_t arena = (uintptr_t)soft_context(b.context)->segment->layout + ARENA_OFFSET;
  struct ibv_sge list[2] = {{(uintptr_t)elsewhere, 64, mr->lkey}};
  struct ibv_recv_wr wr = {.sg_list = list, .num_sge = 1}, *bad;
  CHECK_EQUAL(ibv_post_recv(b.qp, &wr, &bad), EINVAL); /* not from alloc_memory */
  list[0] = (struct ibv_sge){(uintptr_t)a.memory, 64, b.mr->lkey};
  CHECK_EQUAL(ibv_post_recv(b.qp, &wr, &bad), EINVAL); /* from another context's */
  list[0] = (struct ibv_sge){arena - 1, 64, b.mr->lkey};
  CHECK_EQUAL(ibv_post_recv(b.qp, &wr, &bad), EINVAL); /* on the rings */
  list[0] = (struct ibv_sge){arena, UINT32_MAX, b.mr->lkey};
  CHECK_EQUAL(ibv_post_recv(b.qp, &wr, &bad), EINVAL); /* beyond the segment */
  list[0] = (struct ibv_sge){(uintptr_t)b.memory, 64, b.mr->lkey};
  wr.num_sge = 2;
  CHECK_EQUAL(ibv_post_recv(b.qp, &wr, &bad), EINVAL);
  wr.num_sge = -1;
  CHECK_EQUAL(ibv_post_recv(b.qp, &wr, &bad), EINVAL);
  CHECK_EQUAL(side_counters(&b).receives, 0);
  CHECK_EQUAL(verbs_soft()->dereg_mr(mr), 0);
  side_close_pair(&a, &b);
}

/* A list longer than the queue: what fits is posted, bad_wr is the first that did not. */
static void test_overflow_send_wr(void) {
  struct side a, b;
  struct side_options options = {.cqe = 64, .max_send_wr = 4, .max_recv_wr = 8};
  side_open_pair(&a, &b, options);
  struct ibv_send_wr list[6] = {{0}}, *bad = NULL;
  for (int i = 0; i < 6; i++) {
    list[i] = (struct ibv_send_wr){.wr_id = (uint64_t)i, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
    if (i < 5) list[i].next = &list[i + 1];
    CHECK_EQUAL(side_receive(&b, (uint64_t)i, 0, 8), 0);
  }
  CHECK_EQUAL(ibv_post_send(a.qp, list, &bad), ENOMEM);
  CHECK(bad == &list[4]);
  struct ibv_wc wc[6];
  side_poll(&b, wc, 4);
  side_poll(&a, wc, 4);
  for (int i = 0; i < 4; i++) CHECK_EQUAL(wc[i].wr_id, i);
  CHECK_EQUAL(ibv_post_send(a.qp, bad, &bad), 0);
  side_poll(&a, wc, 2);
  side_close_pair(&a, &b);
}

static void test_overflow_recv_wr(void) {
  struct side a, b;
  struct side_options options = {.cqe = 64, .max_send_wr = 8, .max_recv_wr = 3};
  side_open_pair(&a, &b, options);
  struct ibv_recv_wr list[5] = {{0}}, *bad = NULL;
  for (int i = 0; i < 5; i++) {
    list[i].wr_id = (uint64_t)i;
    if (i < 4) list[i].next = &list[i + 1];
  }
  CHECK_EQUAL(ibv_post_recv(b.qp, list, &bad), ENOMEM);
  CHECK(bad == &list[3]);
  for (uint64_t i = 0; i < 4; i++) CHECK_EQUAL(side_send(&a, i, 0, 0, 0), 0);
  CHECK_EQUAL(side_counters(&a).dropped, 1);
  CHECK_EQUAL(ibv_post_recv(b.qp, bad, &bad), ENOMEM); /* arrived, but not polled */
  struct ibv_wc wc[3];
  side_poll(&b, wc, 3);
  CHECK_EQUAL(ibv_post_recv(b.qp, &list[3], &bad), 0);
  side_close_pair(&a, &b);
}

/* An unsignaled request keeps its place in the queue until a later signaled one has been polled. */
static void test_unsignaled_send(void) {
  struct side a, b;
  struct side_options options = {.cqe = 64, .max_send_wr = 4, .max_recv_wr = 8};
  side_open_pair(&a, &b, options);
  struct ibv_wc wc;
  for (uint64_t i = 0; i < 4; i++) CHECK_EQUAL(side_send(&a, i, 0, 8, i == 2 ? IBV_SEND_SIGNALED : 0), 0);
  CHECK_EQUAL(side_send(&a, 4, 0, 8, 0), ENOMEM);
  side_poll_one(&a, 2, IBV_WC_SUCCESS);
  for (uint64_t i = 4; i < 7; i++) CHECK_EQUAL(side_send(&a, i, 0, 8, 0), 0);
  CHECK_EQUAL(side_send(&a, 7, 0, 8, IBV_SEND_SIGNALED), ENOMEM);
  CHECK_EQUAL(ibv_poll_cq(a.cq, 1, &wc), 0); /* nothing signaled: the queue is stuck until RESET */
  side_close(&b);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RESET, side_address(&a)), 0);
  side_to_rts(a.qp, side_address(&a));
  CHECK_EQUAL(side_send(&a, 8, 0, 8, IBV_SEND_SIGNALED), 0);
  side_poll_one(&a, 8, IBV_WC_SUCCESS);
  side_close(&a);
}

static void test_qp_sig_all(void) {
  struct side a, b;
  struct side_options options = {.cqe = 64, .max_send_wr = 4, .max_recv_wr = 8, .sq_sig_all = 1};
  side_open_pair(&a, &b, options);
  CHECK_EQUAL(side_send(&a, 1, 0, 8, 0), 0);
  CHECK_EQUAL(side_send(&a, 2, 0, 8, IBV_SEND_SIGNALED), 0);
  struct ibv_wc wc[2];
  side_poll(&a, wc, 2);
  CHECK(wc[0].wr_id == 1 && wc[1].wr_id == 2);
  side_close_pair(&a, &b);
}

/* One completion queue for several queue pairs: a busy one does not keep the others' completions back. */
static void test_shared_cq(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  struct ibv_qp *a_first = a.qp, *b_first = b.qp;
  a.qp = side_create_qp(&a, SIDE_DEFAULTS);
  b.qp = side_create_qp(&b, SIDE_DEFAULTS);
  side_connect(&a, &b);
  struct ibv_qp *a_second = a.qp, *b_second = b.qp;
  CHECK_EQUAL(side_receive(&b, 50, 0, 8), 0);
  CHECK_EQUAL(side_send(&a, 0, 0, 8, 0), 0);

  a.qp = a_first, b.qp = b_first;
  struct ibv_wc wc;
  int polls = 0;
  do {
    CHECK_EQUAL(side_receive(&b, 1, 64, 8), 0);
    CHECK_EQUAL(side_send(&a, 0, 0, 8, IBV_SEND_SIGNALED), 0);
    side_poll_one(&a, 0, IBV_WC_SUCCESS);
    CHECK_EQUAL(ibv_poll_cq(b.cq, 1, &wc), 1);
    CHECK_EQUAL(wc.qp_num, wc.wr_id == 50 ? b_second->qp_num : b_first->qp_num);
  } while (wc.wr_id != 50 && ++polls < 4);
  CHECK(polls < 4, "the second queue pair starved");
  CHECK_EQUAL(verbs_soft()->destroy_qp(a_second), 0);
  CHECK_EQUAL(verbs_soft()->destroy_qp(b_second), 0);
  side_close_pair(&a, &b);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"SendSizes", test_send_sizes},
      {"Loopback", test_loopback},
      {"SendWithImm", test_send_with_imm},
      {"Order", test_order},
      {"DropWithoutReceive", test_drop_without_receive},
      {"DropUnlessConnected", test_drop_unless_connected},
      {"PostSendInResetInitRtr", test_post_send_in_reset_init_rtr},
      {"PostRecvByState", test_post_recv_by_state},
      {"RejectedSend", test_rejected_send},
      {"RejectedReceive", test_rejected_receive},
      {"OverflowSendWr", test_overflow_send_wr},
      {"OverflowRecvWr", test_overflow_recv_wr},
      {"UnsignaledSend", test_unsignaled_send},
      {"QpSigAll", test_qp_sig_all},
      {"SharedCq", test_shared_cq},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
