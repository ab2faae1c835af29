/* The profile apple-tb5: what RDMA over Thunderbolt refuses is refused, and what it does otherwise than UC is done. */
#define _POSIX_C_SOURCE 200809L
#include "../providers/soft/soft.h"
#include "check.h"
#include "soft_apple.h"

#include <errno.h>
#include <signal.h>

#define BIG_FRAMES (SIDE_BYTES / FRAME) /* of a message as large as the side's memory */

static void test_device(void) {
  struct side side;
  struct ibv_device_attr device;
  struct ibv_port_attr port;
  side_open(&side, options_of(0));
  CHECK_EQUAL(verbs_soft()->query_device(side.context, &device), 0);
  CHECK(device.max_qp == 10 && device.max_qp_wr == 4095 && device.max_sge == 1 && device.max_mr == 100);
  CHECK(device.max_pd == 11 && device.max_cq == 11 && device.max_srq == 0 && device.atomic_cap == IBV_ATOMIC_NONE);
  CHECK_EQUAL(verbs_soft()->query_port(side.context, 1, &port), 0);
  CHECK_EQUAL(port.max_msg_sz, 16773120);
  CHECK_EQUAL(port.link_layer, IBV_LINK_LAYER_THUNDERBOLT);
  CHECK(!verbs_soft_profile("apple-tb5")->registers_freely);
  side_close(&side);
}

static int count_queue_pairs(struct side *side, struct ibv_qp **qps, struct side_options options) {
  int count = 0;
  while (count < 20 && (qps[count] = side_create_qp(side, options))) count++;
  CHECK_EQUAL(errno, EBUSY);
  return count;
}

static void destroy_queue_pairs(struct ibv_qp **qps, int count) {
  for (int i = 0; i < count; i++) CHECK_EQUAL(verbs_soft()->destroy_qp(qps[i]), 0);
}

/* Ten on a device; the next device and the next host have ten of their own. */
static void test_eleventh_queue_pair(void) {
  struct side side, other_host, other_cable;
  struct ibv_qp *qps[20], *more[20];
  struct side_options options = options_of(0);
  side_open(&side, options);
  side_open(&other_host, options_of(1));
  options.device = 1;
  side_open(&other_cable, options);
  CHECK_EQUAL(count_queue_pairs(&side, qps, options), 9); /* each side has one */
  CHECK_EQUAL(count_queue_pairs(&other_host, more, options), 9);
  destroy_queue_pairs(more, 9);
  CHECK_EQUAL(count_queue_pairs(&other_cable, more, options), 9);
  destroy_queue_pairs(more, 9);
  CHECK_EQUAL(verbs_soft()->destroy_qp(qps[3]), 0);
  qps[3] = side_create_qp(&side, options);
  CHECK(qps[3], "a place that was given back: %s", strerror(errno));
  CHECK(!side_create_qp(&side, options) && errno == EBUSY);
  destroy_queue_pairs(qps, 9);
  side_close(&other_cable);
  side_close(&other_host);
  side_close(&side);
}

/* Six that are connected, so that macOS's segments have no names any more when the process is killed. */
static void open_six(struct side_options options, struct side_options other) {
  static struct side a, b;
  side_open(&a, options);
  side_open(&b, other);
  side_connect(&a, &b);
  for (int i = 1; i < 6; i++) {
    struct side more_a = a, more_b = b;
    CHECK((more_a.qp = side_create_qp(&a, options)));
    CHECK((more_b.qp = side_create_qp(&b, other)));
    side_connect(&more_a, &more_b);
  }
  CHECK_EQUAL(side_receive(&a, 1, 0, FRAME), 0);
  CHECK_EQUAL(side_receive(&b, 1, 0, FRAME), 0);
}

/* Another process has six queue pairs until it is killed, and a child. Both end with this process at the latest. */
static pid_t hold_six(struct side_options options, struct side_options other) {
  int ready[2], end[2];
  char byte;
  CHECK(pipe(ready) == 0 && pipe(end) == 0);
  pid_t child = fork();
  if (child == 0) {
    open_six(options, other);
    if (fork() == 0) CHECK_EQUAL(write(ready[1], "x", 1), 1);
    close(end[1]);
    _exit((int)read(end[0], &byte, 1));
  }
  CHECK_EQUAL(read(ready[0], &byte, 1), 1);
  return child;
}

static void test_queue_pairs_of_processes(void) {
  struct side side;
  struct ibv_qp *qps[20];
  struct side_options options = options_of(0);
  pid_t child = hold_six(options, options_of(1));
  side_open(&side, options);
  CHECK_EQUAL(count_queue_pairs(&side, qps, options), 3);
  CHECK_EQUAL(kill(child, SIGKILL), 0);
  check_wait(child);
  destroy_queue_pairs(qps, 3);
  CHECK_EQUAL(count_queue_pairs(&side, qps, options), 9);
  destroy_queue_pairs(qps, 9);
  side_close(&side);
}

static void test_regions(void) {
  const struct verbs *verbs = verbs_soft();
  struct side side;
  struct ibv_mr *mrs[99];
  side_open(&side, options_of(0));
  for (int i = 0; i < 99; i++) CHECK((mrs[i] = verbs->reg_mr(side.pd, side.memory, FRAME, IBV_ACCESS_LOCAL_WRITE)));
  CHECK(!verbs->reg_mr(side.pd, side.memory, FRAME, IBV_ACCESS_LOCAL_WRITE) && errno == ENOMEM);
  CHECK_EQUAL(verbs->dereg_mr(mrs[50]), 0);
  static const size_t unaligned[] = {1, 64, FRAME, 3 * FRAME};
  for (int i = 0; i < 4; i++)
    CHECK(!verbs->reg_mr(side.pd, side.memory + unaligned[i], FRAME, IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL);
  CHECK((mrs[50] = verbs->reg_mr(side.pd, side.memory + SEGMENT_PAGE, 1, IBV_ACCESS_LOCAL_WRITE)));
  for (int i = 0; i < 99; i++) CHECK_EQUAL(verbs->dereg_mr(mrs[i]), 0);
  side_close(&side);
}

static void test_domains_and_completion_queues(void) {
  const struct verbs *verbs = verbs_soft();
  struct side side;
  struct ibv_pd *pds[10];
  struct ibv_cq *cqs[10];
  side_open(&side, options_of(0));
  for (int i = 0; i < 10; i++) CHECK((pds[i] = verbs->alloc_pd(side.context)));
  for (int i = 0; i < 10; i++) CHECK((cqs[i] = verbs->create_cq(side.context, 1, NULL, NULL, 0)));
  CHECK(!verbs->alloc_pd(side.context) && errno == ENOMEM);
  CHECK(!verbs->create_cq(side.context, 1, NULL, NULL, 0) && errno == ENOMEM);
  CHECK_EQUAL(verbs->destroy_qp(side.qp), 0);
  CHECK_EQUAL(verbs->dereg_mr(side.mr), 0);
  for (int i = 0; i < 10; i++) CHECK_EQUAL(verbs->destroy_cq(cqs[i]), 0);
  CHECK_EQUAL(verbs->destroy_cq(side.cq), 0);
  for (int i = 0; i < 10; i++) CHECK_EQUAL(verbs->dealloc_pd(pds[i]), 0);
  CHECK_EQUAL(verbs->dealloc_pd(side.pd), 0);
  CHECK_EQUAL(verbs->close_device(side.context), 0);
}

static void test_queue_pair_refusals(void) {
  struct side side;
  side_open(&side, options_of(0));
  struct ibv_qp_init_attr good = {.send_cq = side.cq, .recv_cq = side.cq, .qp_type = IBV_QPT_UC};
  good.cap = (struct ibv_qp_cap){.max_send_wr = 4095, .max_recv_wr = 4095, .max_send_sge = 1, .max_recv_sge = 1};
  struct ibv_qp_init_attr attr = good;
  struct ibv_qp *qp = verbs_soft()->create_qp(side.pd, &attr);
  CHECK(qp);
  CHECK_EQUAL(verbs_soft()->destroy_qp(qp), 0);
  attr = good, attr.qp_type = IBV_QPT_RC;
  CHECK(!verbs_soft()->create_qp(side.pd, &attr) && errno == EOPNOTSUPP);
  attr = good, attr.qp_type = IBV_QPT_UD;
  CHECK(!verbs_soft()->create_qp(side.pd, &attr) && errno == EOPNOTSUPP);
  attr = good, attr.cap.max_send_wr = 4096;
  CHECK(!verbs_soft()->create_qp(side.pd, &attr) && errno == EINVAL);
  attr = good, attr.cap.max_send_sge = 2;
  CHECK(!verbs_soft()->create_qp(side.pd, &attr) && errno == EINVAL);
  attr = good, attr.cap.max_inline_data = 1;
  CHECK(!verbs_soft()->create_qp(side.pd, &attr) && errno == EINVAL);
  side_close(&side);
}

/* Receives only from RTS on; no move to ERR, after which Apple's provider fails to unmap. */
static void test_states(void) {
  struct side a, b;
  side_open(&a, options_of(0));
  side_open(&b, options_of(1));
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_INIT, side_address(&b)), 0);
  CHECK_EQUAL(side_receive(&a, 1, 0, FRAME), EINVAL);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RTR, side_address(&b)), 0);
  CHECK_EQUAL(side_receive(&a, 1, 0, FRAME), EINVAL);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RTS, side_address(&b)), 0);
  CHECK_EQUAL(side_receive(&a, 1, 0, FRAME), 0);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_ERR, side_address(&b)), EINVAL);
  CHECK_EQUAL(side_state(a.qp), IBV_QPS_RTS);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RESET, side_address(&b)), 0);
  side_close(&b);
  side_close(&a);
}

static int send_as(struct side *side, enum ibv_wr_opcode opcode, uint64_t bytes) {
  struct ibv_sge sge = {(uintptr_t)side->memory, (uint32_t)bytes, side->mr->lkey};
  struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode}, *bad;
  return ibv_post_send(side->qp, &wr, &bad);
}

static void test_send_refusals(void) {
  struct side a, b;
  open_connected(&a, &b);
  CHECK_EQUAL(send_as(&a, IBV_WR_SEND_WITH_IMM, FRAME), EINVAL);
  CHECK_EQUAL(send_as(&a, IBV_WR_RDMA_WRITE, FRAME), EINVAL);
  CHECK_EQUAL(send_as(&a, IBV_WR_RDMA_READ, FRAME), EINVAL);
  CHECK_EQUAL(send_as(&a, IBV_WR_SEND, 4095 * FRAME + 1), EINVAL);
  CHECK_EQUAL(side_send(&a, 1, 0, 8, IBV_SEND_INLINE), EINVAL);
  side_close_pair(&a, &b);
}

static void check_frames(size_t sent, size_t received, enum ibv_wc_status status) {
  struct side a, b;
  open_connected(&a, &b);
  side_fill(a.memory, sent, 1);
  CHECK_EQUAL(side_receive(&b, 1, 0, received), 0);
  CHECK_EQUAL(side_receive(&b, 2, 0, received), 0);
  CHECK_EQUAL(side_send(&a, 3, 0, sent, IBV_SEND_SIGNALED), 0);
  side_poll_one(&a, 3, IBV_WC_SUCCESS);
  struct ibv_wc wc[2];
  side_poll(&b, wc, status == IBV_WC_SUCCESS ? 1 : 2);
  CHECK(wc[0].status == status, "%zu bytes into %zu: status %d", sent, received, wc[0].status);
  CHECK(status == IBV_WC_SUCCESS ? wc[0].byte_len == sent : wc[1].status == IBV_WC_WR_FLUSH_ERR);
  if (status == IBV_WC_SUCCESS) side_verify(b.memory, sent, 1);
  CHECK_EQUAL(side_state(b.qp), status == IBV_WC_SUCCESS ? IBV_QPS_RTS : IBV_QPS_ERR);
  side_close_pair(&a, &b);
}

static void test_unequal_frames(void) {
  check_frames(1, FRAME, IBV_WC_SUCCESS);
  check_frames(FRAME + 1, 2 * FRAME, IBV_WC_SUCCESS);
  check_frames(2 * FRAME, 2 * FRAME - 1, IBV_WC_LOC_LEN_ERR);
  check_frames(FRAME, FRAME + 1, IBV_WC_LOC_LEN_ERR);
  check_frames(2 * FRAME, 3 * FRAME, IBV_WC_LOC_LEN_ERR);
  check_frames(3 * FRAME, 2 * FRAME, IBV_WC_LOC_LEN_ERR);
}

/* A full queue of frames waits; the next one is rejected until a completion has been polled. */
static void check_depth(uint32_t asked, size_t frames) {
  struct side a, b;
  struct ibv_wc wc[32];
  struct side_options options = options_of(0);
  struct ibv_qp_attr attr;
  struct ibv_qp_init_attr init;
  options.max_send_wr = options.max_recv_wr = asked;
  side_open(&a, options);
  options.host++;
  side_open(&b, options);
  side_connect(&a, &b);
  CHECK_EQUAL(verbs_soft()->query_qp(a.qp, &attr, IBV_QP_CAP, &init), 0);
  CHECK(attr.cap.max_send_wr == frames && attr.cap.max_recv_wr == frames && init.cap.max_send_wr == frames);
  size_t count = frames / BIG_FRAMES, rest = (frames - count * BIG_FRAMES) * FRAME;
  for (int round = 0; round < 2; round++) {
    for (uint64_t i = 0; i < count; i++) CHECK_EQUAL(side_send(&a, i, 0, SIDE_BYTES, IBV_SEND_SIGNALED), 0);
    CHECK_EQUAL(side_send(&a, count, 0, rest, IBV_SEND_SIGNALED), 0);
    CHECK_EQUAL(side_send(&a, count + 1, 0, 1, IBV_SEND_SIGNALED), ENOMEM);
    CHECK_EQUAL(ibv_poll_cq(a.cq, 1, wc), 0); /* no receive, no credit */

    for (uint64_t i = 0; i < count; i++) CHECK_EQUAL(side_receive(&b, i, 0, SIDE_BYTES), 0);
    CHECK_EQUAL(side_receive(&b, count, 0, rest), 0);
    CHECK_EQUAL(side_receive(&b, count + 1, 0, 0), ENOMEM);
    side_poll(&a, wc, (int)count + 1);
    side_poll(&b, wc, (int)count + 1);
    for (uint64_t i = 0; i <= count; i++) CHECK(wc[i].wr_id == i && wc[i].status == IBV_WC_SUCCESS);
  }
  side_close_pair(&a, &b);
}

/* Queues are deeper than asked for, and hold fewer messages than they are deep. */
static void test_queued_frames(void) {
  check_depth(32, 1023);
  check_depth(256, 1023);
  check_depth(1024, 2047);
  check_depth(4095, 4095);
}

static void check_number(const struct side *side, size_t place, uint64_t expected) {
  uint64_t number;
  memcpy(&number, side->memory + place * FRAME, sizeof number);
  CHECK_EQUAL(number, expected);
}

static void send_numbered(struct side *side, uint64_t first, uint64_t end) {
  for (uint64_t n = first; n < end; n++) {
    memcpy(side->memory + n * FRAME, &n, sizeof n);
    CHECK_EQUAL(side_send(side, n, n * FRAME, FRAME, IBV_SEND_SIGNALED), 0);
  }
}

/* A SEND that meets no receive waits, also over the peer's RESET, and is never dropped. */
static void test_credit(void) {
  struct side a, b;
  struct ibv_wc wc[8];
  open_connected(&a, &b);
  send_numbered(&a, 0, 3);
  CHECK_EQUAL(ibv_poll_cq(a.cq, 8, wc), 0);
  CHECK_EQUAL(side_receive(&b, 0, 0, FRAME), 0);
  CHECK_EQUAL(ibv_poll_cq(b.cq, 8, wc), 0);
  side_poll_one(&a, 0, IBV_WC_SUCCESS);
  side_poll_one(&b, 0, IBV_WC_SUCCESS);
  check_number(&b, 0, 0);

  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_RESET, side_address(&a)), 0);
  CHECK_EQUAL(ibv_poll_cq(a.cq, 8, wc), 0);
  side_to_rts(b.qp, side_address(&a));
  CHECK_EQUAL(side_receive(&b, 1, FRAME, FRAME), 0);
  CHECK_EQUAL(side_receive(&b, 2, 2 * FRAME, FRAME), 0);
  CHECK_EQUAL(side_receive(&b, 3, 3 * FRAME, FRAME), 0);
  send_numbered(&a, 3, 5); /* sends the others first */
  side_poll(&a, wc, 3);
  side_poll(&b, wc, 3);
  for (uint64_t n = 1; n < 4; n++) {
    CHECK_EQUAL(wc[n - 1].wr_id, n);
    check_number(&b, n, n);
  }
  CHECK_EQUAL(side_counters(&a).dropped, 0);
  side_close_pair(&a, &b); /* with one that still waits */
}

/* A pulled cable is silence here too, and what the cable has lost needs no credit. */
static void test_credit_and_faults(void) {
  struct side a, b;
  struct ibv_wc wc[4];
  open_connected(&a, &b);
  CHECK_EQUAL(verbs_soft()->inject(a.context, "link=down"), 0);
  send_numbered(&a, 0, 2);
  side_poll(&a, wc, 2);
  CHECK_EQUAL(verbs_soft()->inject(a.context, "link=up,error_next=1"), 0);
  send_numbered(&a, 2, 4);
  CHECK_EQUAL(ibv_poll_cq(a.cq, 4, wc), 0);
  CHECK_EQUAL(side_receive(&b, 0, 0, FRAME), 0);
  side_poll(&a, wc, 2);
  CHECK(wc[0].wr_id == 2 && wc[0].status == IBV_WC_GENERAL_ERR);
  CHECK(wc[1].wr_id == 3 && wc[1].status == IBV_WC_WR_FLUSH_ERR);
  CHECK_EQUAL(ibv_poll_cq(b.cq, 4, wc), 0);
  side_close_pair(&a, &b);
}

/* Both sides must play the same device. */
static void test_other_profile(void) {
  struct side apple, ideal;
  side_open(&apple, options_of(0));
  side_open(&ideal, SIDE_DEFAULTS);
  CHECK_EQUAL(side_modify(apple.qp, IBV_QPS_INIT, side_address(&ideal)), 0);
  CHECK_EQUAL(side_modify(apple.qp, IBV_QPS_RTR, side_address(&ideal)), EINVAL);
  CHECK_EQUAL(side_modify(ideal.qp, IBV_QPS_INIT, side_address(&apple)), 0);
  CHECK_EQUAL(side_modify(ideal.qp, IBV_QPS_RTR, side_address(&apple)), EINVAL);
  side_close(&ideal);
  side_close(&apple);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Device", test_device},
      {"EleventhQueuePair", test_eleventh_queue_pair},
      {"QueuePairsOfProcesses", test_queue_pairs_of_processes},
      {"Regions", test_regions},
      {"DomainsAndCompletionQueues", test_domains_and_completion_queues},
      {"QueuePairRefusals", test_queue_pair_refusals},
      {"States", test_states},
      {"SendRefusals", test_send_refusals},
      {"UnequalFrames", test_unequal_frames},
      {"QueuedFrames", test_queued_frames},
      {"Credit", test_credit},
      {"CreditAndFaults", test_credit_and_faults},
      {"OtherProfile", test_other_profile},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
