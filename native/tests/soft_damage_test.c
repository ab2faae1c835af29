/* Damaged messages, SENDs that fail, a cable that is pulled and a process that dies: exactly where it was asked for. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include "soft_side.h"

#include <errno.h>
#include <signal.h>

#define BYTES 256

static void inject(const struct side *side, const char *faults) {
  CHECK(verbs_soft()->inject(side->context, faults) == 0, "\"%s\" was refused", faults);
}

/* One message, which must arrive; how many of its bytes. b's memory is zero behind them. */
static uint32_t next_message(struct side *a, struct side *b, uint64_t n) {
  side_fill(a->memory, BYTES, (unsigned)n);
  memset(b->memory, 0, BYTES);
  CHECK_EQUAL(side_receive(b, n, 0, BYTES), 0);
  CHECK_EQUAL(side_send(a, n, 0, BYTES, IBV_SEND_SIGNALED), 0);
  side_poll_one(a, n, IBV_WC_SUCCESS);
  return side_poll_one(b, n, IBV_WC_SUCCESS).byte_len;
}

static int count_wrong_bits(const char *memory, unsigned seed) {
  char expected[BYTES];
  side_fill(expected, BYTES, seed);
  int wrong = 0;
  for (int i = 0; i < BYTES; i++)
    for (int bit = 0; bit < 8; bit++) wrong += ((memory[i] ^ expected[i]) >> bit) & 1;
  return wrong;
}

static void test_truncate(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  inject(&a, "truncate_next=2,truncate_after=4,seed=3");
  bool differ = false;
  uint32_t last = 0;
  for (uint64_t n = 0; n < 6; n++) {
    uint32_t length = next_message(&a, &b, n);
    bool whole = n == 2 || n > 3;
    CHECK(whole ? length == BYTES : length < BYTES, "message %d has %u bytes", (int)n, length);
    side_verify(b.memory, length, (unsigned)n);
    for (uint32_t i = length; i < BYTES; i++) CHECK_EQUAL(b.memory[i], 0);
    differ |= !whole && n > 0 && length != last;
    last = length;
  }
  CHECK(differ, "all were cut at the same place");
  CHECK_EQUAL(side_counters(&a).truncated_by_fault, 3);
  side_close_pair(&a, &b);
}

/* The pieces of a gathered message, too, end where it is cut. */
static void test_truncate_gathered(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  inject(&a, "truncate=1/1");
  bool short_one = false, long_one = false;
  for (uint64_t n = 0; n < 50; n++) {
    side_fill(a.memory, BYTES, (unsigned)n);
    memset(b.memory, 0, BYTES);
    struct ibv_sge list[2] = {{(uintptr_t)a.memory, BYTES / 2, a.mr->lkey},
                              {(uintptr_t)a.memory + BYTES / 2, BYTES / 2, a.mr->lkey}};
    struct ibv_send_wr wr = {.sg_list = list, .num_sge = 2, .opcode = IBV_WR_SEND}, *bad;
    CHECK_EQUAL(side_receive(&b, n, 0, BYTES), 0);
    CHECK_EQUAL(ibv_post_send(a.qp, &wr, &bad), 0);
    CHECK_EQUAL(side_send(&a, n, 0, 0, IBV_SEND_SIGNALED), 0); /* meets no receive; frees the send queue */
    side_poll_one(&a, n, IBV_WC_SUCCESS);
    uint32_t length = side_poll_one(&b, n, IBV_WC_SUCCESS).byte_len;
    side_verify(b.memory, length, (unsigned)n);
    for (uint32_t i = length; i < BYTES; i++) CHECK_EQUAL(b.memory[i], 0);
    short_one |= length < BYTES / 2;
    long_one |= length > BYTES / 2;
  }
  CHECK(short_one && long_one);
  side_close_pair(&a, &b);
}

static void test_corrupt(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  inject(&a, "corrupt_next=2,corrupt_after=4");
  for (uint64_t n = 0; n < 6; n++) {
    CHECK_EQUAL(next_message(&a, &b, n), BYTES);
    CHECK_EQUAL(count_wrong_bits(b.memory, (unsigned)n), n == 2 || n > 3 ? 0 : 1);
    CHECK_EQUAL(count_wrong_bits(a.memory, (unsigned)n), 0);
  }
  CHECK_EQUAL(side_counters(&a).corrupted_by_fault, 3);
  side_close_pair(&a, &b);
}

/* Over many messages every byte is hit, the first and the last too. */
static void test_corrupt_everywhere(void) {
  struct side a, b;
  bool hit[BYTES] = {false};
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  inject(&a, "corrupt=1/1,seed=1");
  for (uint64_t n = 0; n < 4000; n++) {
    char expected[BYTES];
    next_message(&a, &b, n);
    side_fill(expected, BYTES, (unsigned)n);
    for (int i = 0; i < BYTES; i++) hit[i] |= b.memory[i] != expected[i];
  }
  for (int i = 0; i < BYTES; i++) CHECK(hit[i], "byte %d was never wrong", i);
  side_close_pair(&a, &b);
}

/* What has no bytes cannot be damaged. */
static void test_empty_message(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  inject(&a, "truncate=1/1,corrupt=1/1");
  CHECK_EQUAL(side_receive(&b, 1, 0, 8), 0);
  CHECK_EQUAL(side_send(&a, 1, 0, 0, IBV_SEND_SIGNALED), 0);
  side_poll_one(&a, 1, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_poll_one(&b, 1, IBV_WC_SUCCESS).byte_len, 0);
  CHECK_EQUAL(side_counters(&a).truncated_by_fault, 0);
  CHECK_EQUAL(side_counters(&a).corrupted_by_fault, 0);
  side_close_pair(&a, &b);
}

/* The SEND completes with an error, unsignaled as it is; what is outstanding and what comes later is flushed; the peer
 * notices nothing. */
static void test_error(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  inject(&a, "error_after=2");
  for (uint64_t i = 0; i < 3; i++) CHECK_EQUAL(side_receive(&b, i, 0, 8), 0);
  CHECK_EQUAL(side_receive(&a, 9, 64, 8), 0);
  for (uint64_t i = 0; i < 3; i++) CHECK_EQUAL(side_send(&a, i, 0, 8, 0), 0);
  CHECK_EQUAL(side_state(a.qp), IBV_QPS_ERR);
  struct ibv_wc wc[3];
  side_poll(&a, wc, 3);
  CHECK(wc[0].wr_id == 1 && wc[0].status == IBV_WC_GENERAL_ERR && wc[0].opcode == IBV_WC_SEND);
  CHECK(wc[1].wr_id == 2 && wc[1].status == IBV_WC_WR_FLUSH_ERR && wc[1].opcode == IBV_WC_SEND);
  CHECK(wc[2].wr_id == 9 && wc[2].status == IBV_WC_WR_FLUSH_ERR && wc[2].opcode == IBV_WC_RECV);
  side_poll_one(&b, 0, IBV_WC_SUCCESS);
  CHECK_EQUAL(side_state(b.qp), IBV_QPS_RTS);
  CHECK_EQUAL(side_counters(&a).failed_by_fault, 1);

  CHECK_EQUAL(side_modify(a.qp, IBV_QPS_RESET, side_address(&b)), 0);
  CHECK_EQUAL(side_modify(b.qp, IBV_QPS_RESET, side_address(&a)), 0);
  side_connect(&a, &b);
  CHECK_EQUAL(next_message(&a, &b, 5), BYTES);
  side_close_pair(&a, &b);
}

static enum ibv_port_state port_state(const struct side *side) {
  struct ibv_port_attr port;
  CHECK_EQUAL(verbs_soft()->query_port(side->context, 1, &port), 0);
  return port.state;
}

static void test_link(void) {
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  for (int round = 0; round < 3; round++) {
    inject(&a, "link=down");
    CHECK_EQUAL(port_state(&a), IBV_PORT_DOWN);
    for (uint64_t n = 0; n < 3; n++) {
      CHECK_EQUAL(side_send(&a, n, 0, 8, IBV_SEND_SIGNALED), 0);
      side_poll_one(&a, n, IBV_WC_SUCCESS);
    }
    CHECK_EQUAL(side_state(a.qp), IBV_QPS_RTS);
    inject(&a, round % 2 ? "none" : "link=up");
    CHECK_EQUAL(port_state(&a), IBV_PORT_ACTIVE);
    CHECK_EQUAL(next_message(&a, &b, (uint64_t)round), BYTES);
  }
  CHECK_EQUAL(side_counters(&a).dropped_by_fault, 9);
  CHECK_EQUAL(side_counters(&a).dropped, 0);
  side_close_pair(&a, &b);
}

/* In a process of its own: the third message is never sent. */
static void test_die(void) {
  int results[2];
  CHECK_EQUAL(pipe(results), 0);
  pid_t child = fork();
  if (child == 0) {
    struct side a, b;
    side_open_pair(&a, &b, SIDE_DEFAULTS);
    inject(&a, "die_after=3");
    for (uint64_t n = 0; n < 5; n++) {
      next_message(&a, &b, n);
      CHECK_EQUAL(write(results[1], "x", 1), 1);
    }
    _exit(0);
  }
  int status = check_wait(child);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "status 0x%x", status);
  char sent[8];
  close(results[1]);
  CHECK_EQUAL(read(results[0], sent, sizeof sent), 2);
}

static void test_rejected(void) {
  static const char *const refused[] = {
      "truncate",
      "truncate=2/1",
      "truncate_next",
      "corrupt=1",
      "corrupt_after=x",
      "error_next=-1",
      "error_before=1",
      "die",
      "die=",
      "die_after",
      "link",
      "link=",
      "link=1",
      "link=downup",
      "link=up,down",
      "delay=",
      "delay=1/2",
      "delay=4294967296",
      "jitter",
      "jitter=1us",
      "drop_after",
  };
  struct side a, b;
  side_open_pair(&a, &b, SIDE_DEFAULTS);
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
    CHECK(verbs_soft()->inject(a.context, refused[i]) == EINVAL, "\"%s\" was taken", refused[i]);
  CHECK_EQUAL(next_message(&a, &b, 1), BYTES);
  side_verify(b.memory, BYTES, 1);
  CHECK_EQUAL(port_state(&a), IBV_PORT_ACTIVE);
  side_close_pair(&a, &b);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Truncate", test_truncate},
      {"TruncateGathered", test_truncate_gathered},
      {"Corrupt", test_corrupt},
      {"CorruptEverywhere", test_corrupt_everywhere},
      {"EmptyMessage", test_empty_message},
      {"Error", test_error},
      {"Link", test_link},
      {"Die", test_die},
      {"Rejected", test_rejected},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
