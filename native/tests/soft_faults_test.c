/* Faults on purpose: exactly the messages that were asked for are lost or doubled, and nothing else changes. */
#include "../providers/soft/soft.h"
#include "check.h"
#include "soft_side.h"

#include <errno.h>

#define MANY 20000

/* Messages from a to b, numbered. b has two receives posted before every message, at places 0 and 1. */
struct link {
  struct side a, b;
  uint64_t sent;
};

static void post(struct link *link, uint64_t place) { CHECK_EQUAL(side_receive(&link->b, place, place * 64, 8), 0); }

static void open_link(struct link *link) {
  *link = (struct link){0};
  side_open_pair(&link->a, &link->b, SIDE_DEFAULTS);
  for (uint64_t place = 0; place < 2; place++) post(link, place);
}

static void close_link(struct link *link) { side_close_pair(&link->a, &link->b); }

static void inject(struct link *link, const char *faults) {
  CHECK(verbs_soft()->inject(link->a.context, faults) == 0, "\"%s\" was refused", faults);
}

/* How often the next message arrives: 0, 1 or 2 times. */
static int next_message(struct link *link) {
  uint64_t n = link->sent++;
  memcpy(link->a.memory, &n, sizeof n);
  CHECK_EQUAL(side_send(&link->a, n, 0, 8, IBV_SEND_SIGNALED), 0);
  side_poll_one(&link->a, n, IBV_WC_SUCCESS);
  struct ibv_wc wc[3];
  int count = ibv_poll_cq(link->b.cq, 3, wc);
  for (int i = 0; i < count; i++) {
    CHECK_EQUAL(wc[i].status, IBV_WC_SUCCESS);
    CHECK_EQUAL(wc[i].byte_len, 8);
    CHECK(memcmp(link->b.memory + wc[i].wr_id * 64, &n, 8) == 0, "not message %llu", (unsigned long long)n);
    post(link, wc[i].wr_id);
  }
  return count;
}

/* `expected` has a digit for every message: how often it must arrive. */
static void check_messages(struct link *link, const char *expected) {
  for (size_t i = 0; expected[i]; i++) {
    int count = next_message(link);
    CHECK(count == expected[i] - '0', "message %zu of \"%s\" arrived %d times", i, expected, count);
  }
}

static void check_counters(const struct link *link, uint64_t lost, uint64_t doubled) {
  struct verbs_counters counters = side_counters(&link->a);
  CHECK_EQUAL(counters.sends, link->sent);
  CHECK_EQUAL(counters.dropped_by_fault, lost);
  CHECK_EQUAL(counters.duplicated_by_fault, doubled);
  CHECK_EQUAL(counters.dropped, 0);
  CHECK_EQUAL(counters.bytes_sent, 8 * (link->sent - lost + doubled));
}

static void test_drop_next(void) {
  struct link link;
  open_link(&link);
  check_messages(&link, "111");
  check_counters(&link, 0, 0);
  inject(&link, "drop_next=3");
  check_messages(&link, "000111111");
  check_counters(&link, 3, 0);
  inject(&link, "drop_next=4294967295");
  check_messages(&link, "0000");
  inject(&link, "drop_next=1");
  check_messages(&link, "011");
  inject(&link, "drop_next=0");
  check_messages(&link, "11");
  check_counters(&link, 8, 0);
  close_link(&link);
}

static void test_drop_after(void) {
  struct link link;
  open_link(&link);
  inject(&link, "drop_after=10");
  check_messages(&link, "1111111110111111111111");
  inject(&link, "drop_after=1");
  check_messages(&link, "01111");
  check_counters(&link, 2, 0);
  close_link(&link);
}

/* A message that several faults hit is lost once, and each of them has seen it. */
static void test_drop_by_several(void) {
  struct link link;
  open_link(&link);
  inject(&link, "drop_next=3,drop_after=2");
  check_messages(&link, "0001111");
  inject(&link, "drop_after=4,drop_next=2");
  check_messages(&link, "00101111");
  check_counters(&link, 6, 0);
  inject(&link, "duplicate=1/1,drop_next=1");
  check_messages(&link, "022");
  check_counters(&link, 7, 2);
  close_link(&link);
}

static void record(struct link *link, char *fates) {
  for (int i = 0; i < MANY; i++) fates[i] = (char)next_message(link);
}

static int count_fates(const char *fates, int fate) {
  int count = 0;
  for (int i = 0; i < MANY; i++) count += fates[i] == fate;
  return count;
}

/* Within five standard deviations of what a fair generator gives, and no pattern of a short period. */
static void check_chance(const char *fates, int fate) {
  int count = count_fates(fates, fate);
  CHECK(count > 200 - 70 && count < 200 + 70, "%d of %d messages, expected about 200", count, MANY);
  int in_a_row = 0;
  for (int i = 1; i < MANY; i++) in_a_row += fates[i] == fate && fates[i - 1] == fate;
  CHECK(in_a_row <= 12, "%d pairs of %d, expected about 2", in_a_row, count);
}

static void test_drop_chance(void) {
  static char first[MANY], again[MANY], other[MANY];
  struct link link;
  open_link(&link);
  inject(&link, "seed=7,drop=1/100");
  record(&link, first);
  check_chance(first, 0);
  CHECK_EQUAL(count_fates(first, 1), MANY - count_fates(first, 0));
  check_counters(&link, (uint64_t)count_fates(first, 0), 0);

  record(&link, again);
  CHECK(memcmp(first, again, MANY) != 0, "the generator repeats itself");
  inject(&link, "seed=7");
  record(&link, again);
  CHECK(memcmp(first, again, MANY) == 0, "the same seed gave other faults");
  inject(&link, "seed=8");
  record(&link, other);
  check_chance(other, 0);
  CHECK(memcmp(first, other, MANY) != 0, "another seed gave the same faults");

  inject(&link, "drop=1/1");
  check_messages(&link, "000000");
  inject(&link, "drop=0/1");
  check_messages(&link, "111111");
  inject(&link, "drop=4294967295/4294967295");
  check_messages(&link, "000000");
  close_link(&link);
}

static void test_duplicate_chance(void) {
  static char first[MANY], again[MANY];
  struct link link;
  open_link(&link);
  inject(&link, "duplicate=1/100,seed=0");
  record(&link, first);
  check_chance(first, 2);
  CHECK_EQUAL(count_fates(first, 1), MANY - count_fates(first, 2));
  check_counters(&link, 0, (uint64_t)count_fates(first, 2));
  inject(&link, "seed=0");
  record(&link, again);
  CHECK(memcmp(first, again, MANY) == 0, "the same seed gave other faults");
  close_link(&link);
}

/* The second copy that finds no receive is no message that was dropped. */
static void test_duplicate_without_receive(void) {
  struct link link;
  open_link(&link);
  inject(&link, "duplicate=1/1");
  for (uint64_t i = 0; i < 3; i++) CHECK_EQUAL(side_send(&link.a, i, 0, 8, IBV_SEND_SIGNALED), 0);
  struct ibv_wc wc[3];
  side_poll(&link.b, wc, 2); /* the first message, twice */
  side_poll(&link.a, wc, 3);
  post(&link, 0);
  CHECK_EQUAL(side_send(&link.a, 3, 0, 8, IBV_SEND_SIGNALED), 0);
  side_poll_one(&link.a, 3, IBV_WC_SUCCESS);
  side_poll_one(&link.b, 0, IBV_WC_SUCCESS);
  struct verbs_counters counters = side_counters(&link.a);
  CHECK_EQUAL(counters.duplicated_by_fault, 1);
  CHECK_EQUAL(counters.dropped, 2);
  close_link(&link);
}

static void test_rejected_faults(void) {
  static const char *const refused[] = {
      "",
      " ",
      ",",
      "drop",
      "drop=",
      "drop=1",
      "drop=1/",
      "drop=/2",
      "drop=1/0",
      "drop=0/0",
      "drop=2/1",
      "drop=-1/2",
      "drop=+1/2",
      "drop=0.5",
      "drop=1/2/3",
      "drop=1/4294967296",
      "drop=99999999999999999999999/99999999999999999999999",
      "duplicate=1",
      "drop_next",
      "drop_next=",
      "drop_next=x",
      "drop_next=1x",
      "drop_next=0x1",
      "drop_next=-1",
      "drop_next=4294967296",
      "drop_next=18446744073709551617",
      "drop_next= 1",
      "drop_next=1 ",
      "drop_after=1/2",
      "seed=",
      "none=1",
      "nonesuch",
      "DROP=1/1",
      "drop_next=5,",
      ",drop_next=5",
      "drop_next=5,,drop_after=1",
      "drop_next=5, drop_after=1",
      "drop_next=5;drop_after=1",
      "drop=1/1,drop_next=5,none,bogus",
  };
  struct link link;
  open_link(&link);
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    inject(&link, "drop_next=2,drop_after=4");
    errno = 0;
    int result = verbs_soft()->inject(link.a.context, refused[i]);
    CHECK(result == EINVAL && errno == EINVAL, "\"%s\": %d", refused[i], result);
    check_messages(&link, "00101");
  }
  CHECK_EQUAL(verbs_soft()->inject(link.a.context, NULL), EINVAL);

  /* Not even the generator was touched. */
  static char first[MANY], again[MANY];
  inject(&link, "seed=1,drop=1/100");
  record(&link, first);
  inject(&link, "seed=1");
  CHECK_EQUAL(verbs_soft()->inject(link.a.context, "seed=2,drop=1/1,bogus"), EINVAL);
  record(&link, again);
  CHECK(memcmp(first, again, MANY) == 0, "a refused list changed the faults");
  close_link(&link);
}

static void test_none(void) {
  struct link link;
  open_link(&link);
  inject(&link, "drop=1/1,duplicate=1/1,drop_next=5,drop_after=7");
  check_messages(&link, "00");
  inject(&link, "none");
  check_messages(&link, "11111111");
  inject(&link, "drop=1/1,none,drop_next=1");
  check_messages(&link, "0111");
  check_counters(&link, 3, 0);
  close_link(&link);
}

/* What a list does not name stays in force, and what it names twice is as named last. */
static void test_lists_add_up(void) {
  struct link link;
  open_link(&link);
  inject(&link, "drop_after=4");
  inject(&link, "drop_next=1");
  check_messages(&link, "011011");
  inject(&link, "drop_next=3,drop_next=1");
  check_messages(&link, "0111");
  close_link(&link);
}

/* Faults belong to the sender's context, and count the messages of all its queue pairs. */
static void test_whose_faults(void) {
  struct link link;
  open_link(&link);
  struct ibv_qp *first_a = link.a.qp, *first_b = link.b.qp;
  link.a.qp = side_create_qp(&link.a, SIDE_DEFAULTS);
  link.b.qp = side_create_qp(&link.b, SIDE_DEFAULTS);
  CHECK(link.a.qp && link.b.qp);
  side_connect(&link.a, &link.b);
  struct ibv_qp *second_a = link.a.qp, *second_b = link.b.qp;

  inject(&link, "drop_after=2");
  for (uint64_t i = 0; i < 2; i++) CHECK_EQUAL(side_receive(&link.a, i, i * 8, 8), 0);
  for (uint64_t i = 0; i < 2; i++) CHECK_EQUAL(side_send(&link.b, i, 64, 8, IBV_SEND_SIGNALED), 0);
  struct ibv_wc wc[2];
  side_poll(&link.a, wc, 2); /* the peer's messages are no concern of ours */
  side_poll(&link.b, wc, 2);
  CHECK_EQUAL(side_counters(&link.b).dropped_by_fault, 0);

  CHECK_EQUAL(side_receive(&link.b, 9, 512, 8), 0);
  CHECK_EQUAL(side_send(&link.a, 0, 0, 8, IBV_SEND_SIGNALED), 0);
  side_poll_one(&link.a, 0, IBV_WC_SUCCESS);
  side_poll_one(&link.b, 9, IBV_WC_SUCCESS);
  link.a.qp = first_a, link.b.qp = first_b;
  check_messages(&link, "011");
  CHECK_EQUAL(verbs_soft()->destroy_qp(second_a), 0);
  CHECK_EQUAL(verbs_soft()->destroy_qp(second_b), 0);
  close_link(&link);
}

/* A SEND that fails, or is flushed, never left: no fault is used up on it. */
static void test_failed_sends_are_not_counted(void) {
  struct link link;
  open_link(&link);
  struct ibv_qp *good = link.a.qp;
  struct ibv_mr *mr = link.a.mr;
  inject(&link, "drop_next=1");
  link.a.qp = side_create_qp(&link.a, SIDE_DEFAULTS);
  CHECK(link.a.qp);
  side_to_rts(link.a.qp, side_address(&link.b));
  link.a.mr = &(struct ibv_mr){.lkey = 0xfffff};
  CHECK_EQUAL(side_send(&link.a, 1, 0, 8, IBV_SEND_SIGNALED), 0);
  side_poll_one(&link.a, 1, IBV_WC_LOC_PROT_ERR);
  link.a.mr = mr;
  CHECK_EQUAL(side_send(&link.a, 2, 0, 8, IBV_SEND_SIGNALED), 0);
  side_poll_one(&link.a, 2, IBV_WC_WR_FLUSH_ERR);
  CHECK_EQUAL(verbs_soft()->destroy_qp(link.a.qp), 0);
  link.a.qp = good;
  check_messages(&link, "011");
  CHECK_EQUAL(side_counters(&link.a).dropped_by_fault, 1);
  close_link(&link);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"DropNext", test_drop_next},
      {"DropAfter", test_drop_after},
      {"DropBySeveral", test_drop_by_several},
      {"DropChance", test_drop_chance},
      {"DuplicateChance", test_duplicate_chance},
      {"DuplicateWithoutReceive", test_duplicate_without_receive},
      {"RejectedFaults", test_rejected_faults},
      {"None", test_none},
      {"ListsAddUp", test_lists_add_up},
      {"WhoseFaults", test_whose_faults},
      {"FailedSendsAreNotCounted", test_failed_sends_are_not_counted},
  };
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
