/* Errors of the software provider: what fails a queue pair, what is flushed, and that nothing stale survives. */
#include "check.h"
#include "soft_side.h"

#include <errno.h>

/* The receiver fails as soon as the message arrives; what it had posted behind is flushed. */
static void test_send_with_too_small_recv(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  memset(b.memory, 0x22, 256);
  CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
  CHECK_EQUAL(side_receive(&b, 2, 64, 63), 0);
  CHECK_EQUAL(side_receive(&b, 3, 128, 64), 0);
  for (uint64_t i = 0; i < 3; i++) CHECK_EQUAL(side_send(&a, i, 0, 64, IBV_SEND_SIGNALED), 0);
  struct ibv_wc wc[3];
  side_poll(&a, wc, 3);
  for (int i = 0; i < 3; i++) CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_state(a.qp), IBV_QPS_RTS);
  CHECK_EQUAL(side_state(b.qp), IBV_QPS_ERR);
  CHECK_EQUAL(side_counters(&a).bytes_sent, 64);
  CHECK_EQUAL(side_counters(&a).dropped, 1);

  side_poll(&b, wc, 3);
  static const enum ibv_wc_status expected[] = {IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_WR_FLUSH_ERR};
  for (int i = 0; i < 3; i++) {
    CHECK_EQUAL(wc[i].wr_id, i + 1);
    CHECK_EQUAL(wc[i].status, expected[i]);
  }
  for (int i = 64; i < 256; i++) CHECK_EQUAL(b.memory[i], 0x22);
  side_close_pair(&a, &b);
}

/* Without a query the failure is noticed by polling. */
static void test_length_error_fails_qp_at_poll(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  CHECK_EQUAL(side_receive(&b, 1, 0, 7), 0);
  CHECK_EQUAL(side_send(&a, 1, 0, 8, 0), 0);
  side_poll_one(&b, 1, IBV_WC_LOC_LEN_ERR);
  CHECK_EQUAL(b.qp->state, IBV_QPS_ERR);
  side_close_pair(&a, &b);
}

/* A sender whose range or key is wrong fails itself, signaled or not; the peer sees nothing. */
static void check_bad_send(struct ibv_sge sge, struct side *a, struct side *b) {
  struct ibv_send_wr wr = {.wr_id = 5, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
  side_connect(a, b);
  CHECK_EQUAL(side_receive(b, 1, 0, 256), 0);
  CHECK_EQUAL(side_send(a, 4, 0, 8, 0), 0);
  CHECK_EQUAL(ibv_post_send(a->qp, &wr, &bad), 0);
  side_poll_one(a, 5, IBV_WC_LOC_PROT_ERR);
  CHECK_EQUAL(side_state(a->qp), IBV_QPS_ERR);
  CHECK_EQUAL(side_state(b->qp), IBV_QPS_RTS);
  side_poll_one(b, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_modify(a->qp, IBV_QPS_RESET, side_address(b)), 0);
  CHECK_EQUAL(side_modify(b->qp, IBV_QPS_RESET, side_address(a)), 0);
}

static void test_bad_send_lkey(void) {
  struct side a, b;
  side_open(&a, SIDE_DEFAULTS);
  side_open(&b, SIDE_DEFAULTS);
  uint64_t start = (uintptr_t)a.memory;
  check_bad_send((struct ibv_sge){start, 8, a.mr->lkey + 1}, &a, &b);
  check_bad_send((struct ibv_sge){start, 8, UINT32_MAX}, &a, &b);
  check_bad_send((struct ibv_sge){start + SIDE_BYTES - 7, 8, a.mr->lkey}, &a, &b);
  check_bad_send((struct ibv_sge){start - 1, 8, a.mr->lkey}, &a, &b);
  check_bad_send((struct ibv_sge){0, 8, a.mr->lkey}, &a, &b);
  side_close_pair(&a, &b);
}

/* A receive with a wrong key or range is found when a message arrives, and fails the receiver. */
static void check_bad_receive(struct ibv_sge sge, struct side *a, struct side *b) {
  struct ibv_recv_wr wr = {.wr_id = 5, .sg_list = &sge, .num_sge = 1}, *bad;
  side_connect(a, b);
  CHECK_EQUAL(ibv_post_recv(b->qp, &wr, &bad), 0);
  CHECK_EQUAL(side_receive(b, 6, 0, 64), 0);
  CHECK_EQUAL(side_state(b->qp), IBV_QPS_RTS);
  CHECK_EQUAL(side_send(a, 4, 0, 8, IBV_SEND_SIGNALED), 0);
  side_poll_one(a, 4, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_state(b->qp), IBV_QPS_ERR);
  struct ibv_wc wc[2];
  side_poll(b, wc, 2);
  CHECK(wc[0].wr_id == 5 && wc[0].status == IBV_WC_LOC_PROT_ERR);
  CHECK(wc[1].wr_id == 6 && wc[1].status == IBV_WC_WR_FLUSH_ERR);
  CHECK_EQUAL(side_modify(a->qp, IBV_QPS_RESET, side_address(b)), 0);
  CHECK_EQUAL(side_modify(b->qp, IBV_QPS_RESET, side_address(a)), 0);
}

static void test_bad_recv_lkey(void) {
  struct side a, b;
  side_open(&a, SIDE_DEFAULTS);
  side_open(&b, SIDE_DEFAULTS);
  uint64_t start = (uintptr_t)b.memory;
  check_bad_receive((struct ibv_sge){start, 64, b.mr->lkey + 1}, &a, &b);
  struct ibv_mr *readable = verbs_soft()->reg_mr(b.pd, b.memory, 64, 0);
  check_bad_receive((struct ibv_sge){start, 64, readable->lkey}, &a, &b);
  CHECK_EQUAL(verbs_soft()->dereg_mr(readable), 0);
  side_close_pair(&a, &b);
}

static void test_recv_payload_exceed_mr(void) {
  struct side a, b;
  side_open(&a, SIDE_DEFAULTS);
  side_open(&b, SIDE_DEFAULTS);
  struct ibv_mr *small = verbs_soft()->reg_mr(b.pd, b.memory + 64, 64, IBV_ACCESS_LOCAL_WRITE);
  uint64_t start = (uintptr_t)b.memory;
  check_bad_receive((struct ibv_sge){start + 64, 65, small->lkey}, &a, &b);
  check_bad_receive((struct ibv_sge){start + 63, 64, small->lkey}, &a, &b);
  CHECK_EQUAL(verbs_soft()->dereg_mr(small), 0);
  side_close_pair(&a, &b);
}

/* Everything outstanding is flushed in order, behind what had completed, and so is whatever is posted later. */
static void test_flush_error_poll_together(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  for (uint64_t i = 0; i < 5; i++) CHECK_EQUAL(side_receive(&b, i, 0, 8), 0);
  CHECK_EQUAL(side_send(&a, 0, 0, 8, 0), 0);
  CHECK_EQUAL(side_send(&a, 1, 0, 8, 0), 0);
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_ERR, side_address(&a)), 0);
  CHECK_EQUAL(side_send(&a, 2, 0, 8, 0), 0);
  CHECK_EQUAL(side_counters(&a).dropped, 1);
  CHECK_EQUAL(side_receive(&b, 5, 0, 8), 0);
  struct ibv_wc wc[6];
  side_poll(&b, wc, 6);
  for (int i = 0; i < 6; i++) {
    CHECK_EQUAL(wc[i].wr_id, i);
    CHECK_EQUAL(wc[i].status, i < 2 ? IBV_WC_SUCCESS : IBV_WC_WR_FLUSH_ERR);
    CHECK_EQUAL(wc[i].opcode, IBV_WC_RECV);
  }
  side_close_pair(&a, &b);
}

/* In ERR sends are accepted and flushed, unsignaled ones too, and the queue still has its depth. */
static void test_post_send_in_err(void) {
  struct side a, b;
  struct side_options options = {.cqe = 64, .max_send_wr = 3, .max_recv_wr = 3};
  side_open_pair(&a, &b, options);
  CHECK_EQUAL(side_receive(&b, 1, 0, 8), 0);
  CHECK_EQUAL(side_send(&a, 0, 0, 8, IBV_SEND_SIGNALED), 0);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_ERR, side_address(&b)), 0);
  CHECK_EQUAL(side_send(&a, 1, 0, 8, 0), 0);
  CHECK_EQUAL(side_send(&a, 2, 0, 8, IBV_SEND_SIGNALED), 0);
  CHECK_EQUAL(side_send(&a, 3, 0, 8, 0), ENOMEM);
  struct ibv_wc wc[3];
  side_poll(&a, wc, 3);
  for (int i = 0; i < 3; i++) {
    CHECK_EQUAL(wc[i].wr_id, i);
    CHECK_EQUAL(wc[i].status, i == 0 ? IBV_WC_SUCCESS : IBV_WC_WR_FLUSH_ERR);
  }
  side_poll_one(&b, 1, IBV_WC_SUCCESS);
  side_close_pair(&a, &b);
}

/* RESET forgets everything without completions, those waiting in the queue included, and the queue pairs
 * then connect and work again: no old receive takes a new message, no old completion is polled. */
static void test_reset_discards(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  for (unsigned round = 0; round < 50; round++) {
    unsigned outstanding = round % 8;
    for (uint64_t i = 0; i < outstanding; i++) CHECK_EQUAL(side_receive(&b, 100, 512, 64), 0);
    for (uint64_t i = 0; i < outstanding / 2; i++) CHECK_EQUAL(side_send(&a, 100, 0, 64, IBV_SEND_SIGNALED), 0);
    if (round % 3 == 1) CHECK_EQUAL(side_modify(b.qp, IBV_QPS_ERR, side_address(&a)), 0);
    CHECK_EQUAL(side_modify(b.qp, IBV_QPS_RESET, side_address(&a)), 0);
    uint64_t dropped = side_counters(&a).dropped;
    CHECK_EQUAL(side_send(&a, 101, 0, 64, 0), 0);
    CHECK_EQUAL(side_counters(&a).dropped, dropped + 1);
    CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RESET, side_address(&b)), 0);
    struct ibv_wc wc;
    CHECK_EQUAL(ibv_poll_cq(a.cq, 1, &wc), 0);
    CHECK_EQUAL(ibv_poll_cq(b.cq, 1, &wc), 0);

    side_connect(&a, &b);
    CHECK_EQUAL(ibv_poll_cq(b.cq, 1, &wc), 0);
    side_fill(a.memory, 64, round);
    CHECK_EQUAL(side_receive(&b, round, 0, 64), 0);
    CHECK_EQUAL(side_send(&a, round, 0, 64, IBV_SEND_SIGNALED), 0);
    side_poll_one(&a, round, IBV_WC_SUCCESS);
    side_poll_one(&b, round, IBV_WC_SUCCESS);
    side_verify(b.memory, 64, round);
  }
  side_close_pair(&a, &b);
}

/* The receiver alone restarts, with the same numbers: the sender finds it again by itself. */
static void test_receiver_resets(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
  CHECK_EQUAL(side_send(&a, 1, 0, 64, 0), 0);
  side_poll_one(&b, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_RESET, side_address(&a)), 0);
  side_to_rts(b.qp, side_address(&a));
  CHECK_EQUAL(side_receive(&b, 2, 0, 64), 0);
  CHECK_EQUAL(side_send(&a, 2, 0, 64, 0), 0);
  side_poll_one(&b, 2, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_counters(&a).dropped, 0);
  side_close_pair(&a, &b);
}

/* Another queue pair takes the place of a destroyed one: the old sender does not reach it. */
static void test_replaced_queue_pair(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  uint32_t old = b.qp->qp_num;
  CHECK_EQUAL(verbs_soft()->destroy_qp(b.qp), 0);
  b.qp = side_create_qp(&b, SIDE_DEFAULTS);
  CHECK(b.qp->qp_num != old);
  side_to_rts(b.qp, side_address(&a));
  CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
  CHECK_EQUAL(side_send(&a, 1, 0, 64, 0), 0);
  struct ibv_wc wc;
  CHECK_EQUAL(ibv_poll_cq(b.cq, 1, &wc), 0);
  CHECK_EQUAL(side_counters(&a).dropped, 1);
  side_close_pair(&a, &b);
}

static void test_destroy_with_completions_left(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  CHECK_EQUAL(side_receive(&b, 1, 0, 8), 0);
  CHECK_EQUAL(side_send(&a, 1, 0, 8, IBV_SEND_SIGNALED), 0);
  CHECK_EQUAL(verbs_soft()->destroy_qp(a.qp), 0);
  CHECK_EQUAL(verbs_soft()->destroy_qp(b.qp), 0);
  struct ibv_wc wc;
  CHECK_EQUAL(ibv_poll_cq(a.cq, 1, &wc), 0);
  CHECK_EQUAL(ibv_poll_cq(b.cq, 1, &wc), 0);
  a.qp = side_create_qp(&a, SIDE_DEFAULTS);
  b.qp = side_create_qp(&b, SIDE_DEFAULTS);
  side_close_pair(&a, &b);
}

/* More completions than the queue holds: those that fit are polled, then the queue reports the loss. */
static void check_lost(struct side *side, int survivors) {
  CHECK_EQUAL(side_state(side->qp), IBV_QPS_ERR);
  struct ibv_wc wc[8];
  CHECK_EQUAL(ibv_poll_cq(side->cq, 2, wc), 2);
  CHECK_EQUAL(ibv_poll_cq(side->cq, 8, wc + 2), survivors - 2);
  for (int i = 0; i < survivors; i++) {
    CHECK_EQUAL(wc[i].wr_id, i);
    CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
  }
  CHECK_EQUAL(ibv_poll_cq(side->cq, 8, wc), -EOVERFLOW);
}

static void test_cq_overflow_by_sends(void) {
  struct side a, b;
  struct side_options options = {.cqe = 4, .max_send_wr = 8, .max_recv_wr = 8};
  side_open_pair(&a, &b, options);
  for (uint64_t i = 0; i < 4; i++) CHECK_EQUAL(side_send(&a, i, 0, 8, IBV_SEND_SIGNALED), 0);
  CHECK_EQUAL(side_state(a.qp), IBV_QPS_RTS);
  CHECK_EQUAL(side_send(&a, 4, 0, 8, IBV_SEND_SIGNALED), 0);
  check_lost(&a, 4);
  side_close_pair(&a, &b);
}

static void test_cq_overflow_by_receives(void) {
  struct side a, b;
  struct side_options options = {.cqe = 4, .max_send_wr = 8, .max_recv_wr = 8};
  side_open_pair(&a, &b, options);
  struct ibv_wc wc[4];
  for (uint64_t i = 0; i < 7; i++) CHECK_EQUAL(side_receive(&b, i, 0, 8), 0);
  for (uint64_t i = 0; i < 4; i++) CHECK_EQUAL(side_send(&a, i, 0, 8, 0), 0);
  CHECK_EQUAL(ibv_poll_cq(b.cq, 0, wc), 0);
  CHECK_EQUAL(side_state(b.qp), IBV_QPS_RTS);
  CHECK_EQUAL(side_send(&a, 4, 0, 8, 0), 0);
  CHECK_EQUAL(ibv_poll_cq(b.cq, 0, wc), 0);
  check_lost(&b, 4);
  side_close_pair(&a, &b);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"SendWithTooSmallRecv", test_send_with_too_small_recv},
      {"LengthErrorFailsQpAtPoll", test_length_error_fails_qp_at_poll},
      {"BadSendLkey", test_bad_send_lkey},
      {"BadRecvLkey", test_bad_recv_lkey},
      {"RecvPayloadExceedMr", test_recv_payload_exceed_mr},
      {"FlushErrorPollTogether", test_flush_error_poll_together},
      {"PostSendInErr", test_post_send_in_err},
      {"ResetDiscards", test_reset_discards},
      {"ReceiverResets", test_receiver_resets},
      {"ReplacedQueuePair", test_replaced_queue_pair},
      {"DestroyWithCompletionsLeft", test_destroy_with_completions_left},
      {"CqOverflowBySends", test_cq_overflow_by_sends},
      {"CqOverflowByReceives", test_cq_overflow_by_receives},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
