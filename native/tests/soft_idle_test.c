/* The fault `idle`: a queue pair that has been silent for too long stays silent. */
#include "check.h"
#include "simulated_clock.h"
#include "soft_side.h"

#define MESSAGE 100
#define MILLISECOND 1000000

static void send_one(struct side *side, uint64_t wr_id) {
  CHECK_EQUAL(side_send(side, wr_id, 0, MESSAGE, IBV_SEND_SIGNALED), 0);
}

/* After too long a silence the queue pair carries nothing, and nothing says so; a new one does. */
static void test_idle(void) {
  struct side a, b;
  struct ibv_wc wc[2];
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  CHECK_EQUAL(verbs_soft()->inject(a.context, "idle=100"), 0);
  CHECK_EQUAL(side_receive(&b, 1, 0, MESSAGE), 0);
  send_one(&a, 0);
  side_poll_one(&a, 0, IBV_WC_SUCCESS);
  side_poll_one(&b, 1, IBV_WC_SUCCESS);
  simulated_clock_pass(150 * MILLISECOND);
  CHECK_EQUAL(side_receive(&b, 2, 0, MESSAGE), 0);
  send_one(&a, 1);
  send_one(&a, 2);
  side_poll(&a, wc, 2);
  CHECK(wc[0].status == IBV_WC_SUCCESS && wc[1].status == IBV_WC_SUCCESS);
  CHECK_EQUAL(ibv_poll_cq(b.cq, 2, wc), 0);
  CHECK_EQUAL(side_counters(&a).dropped_by_fault, 2);

  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RESET, side_address(&b)), 0);
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_RESET, side_address(&a)), 0);
  side_connect(&a, &b);
  CHECK_EQUAL(side_receive(&b, 3, 0, MESSAGE), 0);
  send_one(&a, 3);
  side_poll_one(&a, 3, IBV_WC_SUCCESS);
  side_poll_one(&b, 3, IBV_WC_SUCCESS);
  side_close_pair(&a, &b);
}

/* What arrives keeps a queue pair awake as well. */
static void test_idle_receiver(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  CHECK_EQUAL(verbs_soft()->inject(a.context, "idle=1000"), 0);
  for (uint64_t n = 0; n < 3; n++) {
    simulated_clock_pass(400 * MILLISECOND);
    CHECK_EQUAL(side_receive(&a, n, 0, MESSAGE), 0);
    send_one(&b, n);
    side_poll_one(&b, n, IBV_WC_SUCCESS);
    side_poll_one(&a, n, IBV_WC_SUCCESS);
  }
  CHECK_EQUAL(side_receive(&b, 1, 0, MESSAGE), 0);
  send_one(&a, 1);
  side_poll_one(&b, 1, IBV_WC_SUCCESS);
  side_close_pair(&a, &b);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Idle", test_idle},
      {"IdleReceiver", test_idle_receiver},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
