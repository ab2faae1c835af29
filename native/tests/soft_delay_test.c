/* SENDs that leave late: in order, not before their time, with their memory read when they leave. */
#include "check.h"
#include "simulated_clock.h"
#include "soft_side.h"

#include <errno.h>

#define LATE_NS 30000000

static void inject(const struct side *side, const char *faults) {
  CHECK(verbs_soft()->inject(side->context, faults) == 0, "\"%s\" was refused", faults);
}

static void post(struct side *to, uint64_t count) {
  for (uint64_t n = 0; n < count; n++) CHECK_EQUAL(side_receive(to, n, n * 64, 8), 0);
}

/* Messages that say which one they are. */
static void send_numbered(struct side *from, uint64_t first, uint64_t end) {
  for (uint64_t n = first; n < end; n++) {
    memcpy(from->memory + n * 64, &n, sizeof n);
    CHECK_EQUAL(side_send(from, n, n * 64, 8, IBV_SEND_SIGNALED), 0);
  }
}

static void check_none(struct side *side) {
  struct ibv_wc wc;
  CHECK_EQUAL(ibv_poll_cq(side->cq, 1, &wc), 0);
}

static void check_arrived(struct side *side, uint64_t first, uint64_t end) {
  struct ibv_wc wc[8];
  side_poll(side, wc, (int)(end - first));
  for (uint64_t n = first; n < end; n++) {
    CHECK_EQUAL(wc[n - first].wr_id, n);
    CHECK(memcmp(side->memory + n * 64, &n, sizeof n) == 0, "not message %llu", (unsigned long long)n);
  }
}

static void test_delay(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  post(&b, 6);
  uint64_t begun = simulated_clock_now();
  inject(&a, "delay=30000");
  send_numbered(&a, 0, 3);
  inject(&a, "none");
  send_numbered(&a, 3, 6); /* not late themselves, but behind those that are */
  check_none(&b);
  struct ibv_wc wc[6];
  side_poll(&a, wc, 6);
  CHECK(simulated_clock_now() - begun >= LATE_NS);
  for (int n = 0; n < 6; n++) CHECK(wc[n].wr_id == (uint64_t)n && wc[n].status == IBV_WC_SUCCESS);
  check_arrived(&b, 0, 6);
  CHECK_EQUAL(side_counters(&a).delayed_by_fault, 3);
  CHECK_EQUAL(side_counters(&a).dropped, 0);
  side_close_pair(&a, &b);
}

/* The next post sends them, too, before its own. */
static void test_post_sends_what_is_due(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  post(&b, 3);
  inject(&a, "delay=30000");
  send_numbered(&a, 0, 2);
  inject(&a, "none");
  check_none(&b);
  simulated_clock_pass(LATE_NS);
  check_none(&b);
  send_numbered(&a, 2, 3);
  check_arrived(&b, 0, 3);
  side_close_pair(&a, &b);
}

static void test_jitter(void) {
  struct side a, b;
  side_open_pair(&a, &b, (struct side_options){.cqe = 64, .max_send_wr = 7, .max_recv_wr = 8});
  inject(&a, "jitter=300,delay=10,seed=5");
  for (int round = 0; round < 100; round++) {
    post(&b, 7);
    send_numbered(&a, 0, 7);
    CHECK_EQUAL(side_send(&a, 7, 0, 8, 0), ENOMEM);
    struct ibv_wc wc[7];
    side_poll(&a, wc, 7);
    check_arrived(&b, 0, 7);
  }
  CHECK_EQUAL(side_counters(&a).delayed_by_fault, 700);
  side_close_pair(&a, &b);
}

/* The faults of a late SEND are those in force when it leaves. */
static void test_late_and_lost(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  post(&b, 4);
  inject(&a, "delay=1000,drop_next=2");
  send_numbered(&a, 0, 4);
  struct ibv_wc wc[4];
  side_poll(&a, wc, 4);
  side_poll(&b, wc, 2);
  uint64_t n;
  CHECK(wc[0].wr_id == 0 && wc[1].wr_id == 1);
  CHECK(memcpy(&n, b.memory, sizeof n) && n == 2);
  CHECK(memcpy(&n, b.memory + 64, sizeof n) && n == 3);
  side_close_pair(&a, &b);
}

static void check_flushed(struct side *side, int count, enum ibv_wc_status first) {
  struct ibv_wc wc[8];
  side_poll(side, wc, count);
  for (int n = 0; n < count; n++) {
    CHECK_EQUAL(wc[n].wr_id, n);
    CHECK_EQUAL(wc[n].status, n == 0 ? first : IBV_WC_WR_FLUSH_ERR);
  }
}

/* In ERR nothing is late: what waits is flushed, and what is posted later too. */
static void test_flushed(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  post(&b, 4);
  inject(&a, "delay=4294967295");
  send_numbered(&a, 0, 3);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_ERR, side_address(&b)), 0);
  send_numbered(&a, 3, 4);
  check_flushed(&a, 4, IBV_WC_WR_FLUSH_ERR);
  check_none(&b);
  side_close_pair(&a, &b);
}

/* A late SEND that fails takes those behind it with it. */
static void test_late_error(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  post(&b, 4);
  inject(&a, "delay=1000,error_next=1");
  send_numbered(&a, 0, 4);
  check_flushed(&a, 4, IBV_WC_GENERAL_ERR);
  check_none(&b);
  side_close_pair(&a, &b);
}

/* RESET and destroy_qp forget what waits. Its memory may be deregistered before: then nothing of it leaves. */
static void test_forgotten(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  post(&b, 2);
  inject(&a, "delay=1000");
  send_numbered(&a, 0, 2);
  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RESET, side_address(&b)), 0);
  side_to_rts(a.qp, side_address(&b));
  check_none(&a);

  struct ibv_mr *mr = a.mr;
  a.mr = verbs_soft()->reg_mr(a.pd, a.memory, 4096, 0);
  send_numbered(&a, 0, 2);
  CHECK_EQUAL(verbs_soft()->dereg_mr(a.mr), 0);
  a.mr = mr;
  check_flushed(&a, 2, IBV_WC_LOC_PROT_ERR);
  check_none(&b);

  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RESET, side_address(&b)), 0);
  side_to_rts(a.qp, side_address(&b));
  send_numbered(&a, 0, 2);
  side_close_pair(&a, &b);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Delay", test_delay},         {"PostSendsWhatIsDue", test_post_sends_what_is_due},
      {"Jitter", test_jitter},       {"LateAndLost", test_late_and_lost},
      {"Flushed", test_flushed},     {"LateError", test_late_error},
      {"Forgotten", test_forgotten},
  };
  simulated_clock_set_reading(1000);
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
