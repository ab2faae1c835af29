/* What a peer of the software provider may do to us: be gone, stop in the middle of a copy, write nonsense. */
#define _POSIX_C_SOURCE 200809L
#include "../providers/soft/soft.h"
#include "check.h"
#include "soft_side.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

/* The peer is gone altogether: its memory stays mapped here, and sends vanish. */
static void test_peer_closed(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  CHECK_EQUAL(side_receive(&b, 1, 0, 4096), 0);
  struct side_address address = side_address(&b);
  side_close(&b);
  for (uint64_t i = 0; i < 100; i++) {
    CHECK_EQUAL(side_send(&a, i, 0, 4096, IBV_SEND_SIGNALED), 0);
    side_poll_one(&a, i, IBV_WC_SUCCESS);
  }
  CHECK_EQUAL(side_counters(&a).dropped, 100);

  /* Mapped or not, a closed segment takes no new connection. */
  struct ibv_qp *late = side_create_qp(&a, SIDE_DEFAULTS);
  CHECK_EQUAL(side_modify(late, IBV_QPS_INIT, address), 0);
  CHECK_EQUAL(side_modify(late, IBV_QPS_RTR, address), ENOENT);
  CHECK_EQUAL(verbs_soft()->destroy_qp(late), 0);
  side_close(&a);
}

/* A peer that has claimed a receive and is still copying, done by hand on the shared words. */
static void claim_by_hand(struct side *receiver) {
  struct shared_queue_pair *shared = soft_qp(receiver->qp)->shared;
  CHECK_EQUAL(atomic_fetch_add(&shared->claim, 1) & CLAIM_CLOSED, 0);
}

static void *finish_copy(void *receiver) {
  struct soft_qp *qp = soft_qp(((struct side *)receiver)->qp);
  struct timespec pause = {.tv_nsec = 50000000};
  uint64_t position = qp->rq_head;
  nanosleep(&pause, NULL);
  struct shared_completion *completion = &qp->shared->completions[position & qp->rq_mask];
  completion->byte_len = 8;
  atomic_store_explicit(&completion->sequence, position + 1, memory_order_release);
  return NULL;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* No receive's memory is handed back to its owner while a peer still writes into it. */
static void test_error_waits_for_a_copy(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  CHECK_EQUAL(side_receive(&b, 1, 0, 8), 0);
  CHECK_EQUAL(side_receive(&b, 2, 0, 8), 0);
  claim_by_hand(&b);
  pthread_t thread;
  double start = seconds();
  CHECK_EQUAL(pthread_create(&thread, NULL, finish_copy, &b), 0);
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_ERR, side_address(&a)), 0);
  CHECK(seconds() - start > 0.045, "did not wait");
  CHECK_EQUAL(pthread_join(thread, NULL), 0);
  struct ibv_wc wc[2];
  side_poll(&b, wc, 2);
  CHECK(wc[0].wr_id == 1 && wc[0].status == IBV_WC_SUCCESS);
  CHECK(wc[1].wr_id == 2 && wc[1].status == IBV_WC_WR_FLUSH_ERR);
  CHECK(!soft_context(b.context)->tainted);
  side_close_pair(&a, &b);
}

/* A peer that died in the middle of a copy: bounded waiting, then neither its buffer nor its ring is used again. */
static void test_error_gives_up_on_a_copy(void) {
  const struct verbs *verbs = verbs_soft();
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  CHECK_EQUAL(side_receive(&b, 1, 0, 8), 0);
  claim_by_hand(&b);
  double start = seconds();
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_ERR, side_address(&a)), 0);
  CHECK(seconds() - start < 10, "waited %f s", seconds() - start);
  side_poll_one(&b, 1, IBV_WC_WR_FLUSH_ERR);
  verbs->free_memory(b.context, b.memory, SIDE_BYTES);
  char *next = verbs->alloc_memory(b.context, 64);
  CHECK(next && next != b.memory);
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_RESET, side_address(&a)), 0);
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_INIT, side_address(&a)), EIO);
  CHECK(!side_create_qp(&b, SIDE_DEFAULTS) && errno == EIO);
  side_close_pair(&a, &b);
}

/* Whatever a peer writes into its own segment, a sender stays within that segment. */
static void test_peer_segment_is_not_trusted(void) {
  static const struct shared_receive bad[] = {{SEGMENT_BYTES, 64, 0},   {SEGMENT_BYTES - 63, 64, 0},
                                              {UINT64_MAX - 32, 64, 0}, {UINT64_C(1) << 63, 64, 0},
                                              {0, UINT32_MAX, 0},       {ARENA_OFFSET, 64, 99}};
  struct side a, b;
  side_open(&a, SIDE_DEFAULTS);
  side_open(&b, SIDE_DEFAULTS);
  struct shared_queue_pair *shared = soft_qp(b.qp)->shared;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    side_connect(&a, &b);
    CHECK_EQUAL(side_receive(&b, 1, 0, 64), 0);
    shared->receives[(soft_qp(b.qp)->rq_posted - 1) & soft_qp(b.qp)->rq_mask] = bad[i];
    CHECK_EQUAL(side_send(&a, 1, 0, 64, 0), 0);
    CHECK_EQUAL(side_counters(&a).bytes_sent, 0);
    CHECK_EQUAL(side_state(b.qp), IBV_QPS_ERR);
    CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RESET, side_address(&b)), 0);
    CHECK_EQUAL(side_modify(b.qp, IBV_QPS_RESET, side_address(&a)), 0);
  }
  static const uint32_t sizes[] = {0, 3, SOFT_MAX_WR * 2, UINT32_MAX};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    side_connect(&a, &b);
    atomic_store(&shared->ring_size, sizes[i]);
    atomic_store(&shared->posted, UINT64_MAX);
    CHECK_EQUAL(side_send(&a, 1, 0, 64, 0), 0);
    CHECK_EQUAL(side_counters(&a).dropped, i + 1);
    CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RESET, side_address(&b)), 0);
    CHECK_EQUAL(side_modify(b.qp, IBV_QPS_RESET, side_address(&a)), 0);
  }
  side_close_pair(&a, &b);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"PeerClosed", test_peer_closed},
      {"ErrorWaitsForACopy", test_error_waits_for_a_copy},
      {"ErrorGivesUpOnACopy", test_error_gives_up_on_a_copy},
      {"PeerSegmentIsNotTrusted", test_peer_segment_is_not_trusted},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
