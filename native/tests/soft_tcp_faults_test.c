/* Faults on purpose do by TCP what they do in shared memory: exactly what was asked for is lost, doubled or damaged. */
#define _GNU_SOURCE 1
#include "tcp_pair.h"

#include <signal.h>

#define BYTES 5000
#define SLOT 8192

static void inject(struct side *side, const char *faults) {
  CHECK(verbs_soft()->inject(side->context, faults) == 0, "\"%s\" was refused", faults);
}

static void post(struct side *side, uint64_t slot) { CHECK_EQUAL(side_receive(side, slot, slot * SLOT, SLOT), 0); }

static void open_pair(struct side *a, struct side *b) {
  tcp_open_pair(a, b, TCP_DEFAULTS);
  for (uint64_t slot = 0; slot < 8; slot++) post(b, slot);
}

static void send_one(struct side *a, unsigned seed) {
  side_fill(a->memory, BYTES, seed);
  CHECK_EQUAL(side_send(a, seed, 0, BYTES, IBV_SEND_SIGNALED), 0);
}

/* What b gets next is whole, and message `seed`. */
static void expect(struct side *a, struct side *b, unsigned seed) {
  struct ibv_wc wc = tcp_next(b, a);
  CHECK_EQUAL(wc.status, IBV_WC_SUCCESS);
  CHECK_EQUAL(wc.byte_len, BYTES);
  side_verify(b->memory + wc.wr_id * SLOT, BYTES, seed);
  post(b, wc.wr_id);
}

static void test_drop_and_duplicate(void) {
  struct side a, b;
  open_pair(&a, &b);
  inject(&a, "drop_after=2,duplicate_after=3");
  for (unsigned n = 1; n <= 4; n++) {
    send_one(&a, n);
    tcp_poll_one(&a, &b, n, IBV_WC_SUCCESS);
  }
  expect(&a, &b, 1);
  expect(&a, &b, 3);
  expect(&a, &b, 3);
  expect(&a, &b, 4);
  struct verbs_counters counters = side_counters(&a);
  CHECK_EQUAL(counters.dropped_by_fault, 1);
  CHECK_EQUAL(counters.duplicated_by_fault, 1);
  CHECK_EQUAL(counters.bytes_sent, 4 * BYTES);
  CHECK_EQUAL(side_counters(&b).dropped, 0);
  side_close_pair(&a, &b);
}

static void test_truncate(void) {
  struct side a, b;
  open_pair(&a, &b);
  for (unsigned n = 0; n < 50; n++) {
    inject(&a, "truncate_next=1");
    send_one(&a, n);
    tcp_poll_one(&a, &b, n, IBV_WC_SUCCESS);
    struct ibv_wc wc = tcp_next(&b, &a);
    CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len < BYTES);
    side_verify(b.memory + wc.wr_id * SLOT, wc.byte_len, n);
    post(&b, wc.wr_id);
    send_one(&a, n + 1);
    tcp_poll_one(&a, &b, n + 1, IBV_WC_SUCCESS);
    expect(&a, &b, n + 1);
  }
  CHECK_EQUAL(side_counters(&a).truncated_by_fault, 50);
  side_close_pair(&a, &b);
}

/* One bit, wherever it falls in a message that is gathered from three places; the sender's memory stays as it was. */
static void test_corrupt(void) {
  struct side a, b;
  open_pair(&a, &b);
  side_fill(a.memory, BYTES, 1);
  struct ibv_sge list[3] = {{.length = 3}, {.length = 2000}, {.length = BYTES - 2003}};
  uint64_t addr = (uintptr_t)a.memory;
  for (int i = 0; i < 3; addr += list[i++].length) list[i].addr = addr, list[i].lkey = a.mr->lkey;
  struct ibv_send_wr wr = {.sg_list = list, .num_sge = 3, .opcode = IBV_WR_SEND}, *bad;
  inject(&a, "corrupt=1/1,seed=4");
  for (int n = 0; n < 200; n++) {
    if (n == 100) list[1].length = 0, list[2].length = 0; /* a message of 3 bytes */
    wr.send_flags = IBV_SEND_SIGNALED;
    CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), 0);
    tcp_poll_one(&a, &b, 0, IBV_WC_SUCCESS);
    struct ibv_wc wc = tcp_next(&b, &a);
    CHECK_EQUAL(wc.byte_len, n < 100 ? BYTES : 3);
    const char *got = b.memory + wc.wr_id * SLOT;
    int bits = 0;
    for (uint32_t i = 0; i < wc.byte_len; i++) bits += __builtin_popcount((unsigned char)(got[i] ^ a.memory[i]));
    CHECK_EQUAL(bits, 1);
    side_verify(a.memory, BYTES, 1);
    post(&b, wc.wr_id);
  }
  CHECK_EQUAL(side_counters(&a).corrupted_by_fault, 200);
  side_close_pair(&a, &b);
}

static void test_error(void) {
  struct side a, b;
  open_pair(&a, &b);
  inject(&a, "error_after=2");
  send_one(&a, 1);
  send_one(&a, 2);
  tcp_poll_one(&a, &b, 1, IBV_WC_SUCCESS);
  tcp_poll_one(&a, &b, 2, IBV_WC_GENERAL_ERR);
  CHECK_EQUAL(side_state(a.qp), IBV_QPS_ERR);
  expect(&a, &b, 1); /* it had left */
  tcp_reconnect(&a, &b, 5);
  tcp_settle(&a, &b);
  for (uint64_t slot = 0; slot < 8; slot++) post(&b, slot);
  send_one(&a, 3);
  expect(&a, &b, 3);
  side_close_pair(&a, &b);
}

static void test_delay(void) {
  struct side a, b;
  open_pair(&a, &b);
  inject(&a, "delay=20000");
  send_one(&a, 1);
  struct ibv_wc wc;
  CHECK_EQUAL(soft_qp(a.qp)->sq_left, 0);
  CHECK_EQUAL(ibv_poll_cq(b.cq, 1, &wc), 0);
  inject(&a, "none");
  CHECK_EQUAL(side_send(&a, 2, 0, BYTES, IBV_SEND_SIGNALED), 0); /* behind it */
  tcp_poll_one(&a, &b, 1, IBV_WC_SUCCESS);
  tcp_poll_one(&a, &b, 2, IBV_WC_SUCCESS);
  expect(&a, &b, 1);
  expect(&a, &b, 1);
  CHECK_EQUAL(side_counters(&a).delayed_by_fault, 1);
  side_close_pair(&a, &b);
}

static void test_link_down(void) {
  struct side a, b;
  open_pair(&a, &b);
  inject(&a, "link=down");
  for (unsigned n = 0; n < 3; n++) {
    send_one(&a, n);
    tcp_poll_one(&a, &b, n, IBV_WC_SUCCESS);
  }
  inject(&a, "link=up");
  send_one(&a, 9);
  tcp_poll_one(&a, &b, 9, IBV_WC_SUCCESS);
  expect(&a, &b, 9);
  CHECK_EQUAL(side_counters(&a).dropped_by_fault, 3);
  side_close_pair(&a, &b);
}

/* Chances over many messages: what arrives is in order, and as many as the counters say. */
static void test_chances(void) {
  struct side a, b;
  open_pair(&a, &b);
  inject(&a, "drop=1/5,duplicate=1/4,seed=3");
  uint32_t received = 0, last = 0;
  for (uint32_t n = 1; n <= 2000; n++) {
    memcpy(a.memory, &n, sizeof n);
    CHECK_EQUAL(side_send(&a, n, 0, sizeof n, IBV_SEND_SIGNALED), 0);
    tcp_poll_one(&a, &b, n, IBV_WC_SUCCESS);
    struct ibv_wc wc;
    while (ibv_poll_cq(b.cq, 1, &wc) > 0) {
      uint32_t value;
      memcpy(&value, b.memory + wc.wr_id * SLOT, sizeof value);
      CHECK(value == last || value > last, "%u after %u", value, last);
      last = value;
      received++;
      post(&b, wc.wr_id);
    }
  }
  struct verbs_counters counters = side_counters(&a);
  uint64_t expected = 2000 - counters.dropped_by_fault + counters.duplicated_by_fault;
  while (received < expected) {
    struct ibv_wc wc = tcp_next(&b, &a);
    post(&b, wc.wr_id);
    received++;
  }
  CHECK(counters.dropped_by_fault > 300 && counters.duplicated_by_fault > 200);
  CHECK_EQUAL(side_counters(&b).dropped, 0);
  side_close_pair(&a, &b);
}

static void test_die(void) {
  struct side a, b;
  pid_t child = fork();
  if (child == 0) {
    open_pair(&a, &b);
    inject(&a, "die_after=2");
    send_one(&a, 1);
    send_one(&a, 2);
    exit(0);
  }
  int status = check_wait(child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"DropAndDuplicate", test_drop_and_duplicate},
      {"Truncate", test_truncate},
      {"Corrupt", test_corrupt},
      {"Error", test_error},
      {"Delay", test_delay},
      {"LinkDown", test_link_down},
      {"Chances", test_chances},
      {"Die", test_die},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
